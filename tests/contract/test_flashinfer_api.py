"""The recorded signatures of FlashInfer are those of the package."""

from __future__ import annotations

import json
import os

import pytest

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed here: make contract-flashinfer")

from tests.contract.flashinfer_api import FILE, record, text  # noqa: E402


def test_the_recorded_signatures_are_those_of_this_package() -> None:
    if os.environ.get("TRTSPEC_RECORD"):
        FILE.write_text(text(record()), encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8")) == record()
