"""Golden files: summaries of networks and builder settings that are known to be right."""

from __future__ import annotations

import os
from pathlib import Path

import onnxscript
import pytest
import torch

from tests.fake_tensorrt.builder import FakeConfig
from tests.fake_tensorrt.network import FakeNetwork
from tests.fake_tensorrt.summary import summary

GOLDEN = Path(__file__).with_name("golden")
MADE_WITH = f"torch {torch.__version__.split('+')[0]}, onnxscript {onnxscript.__version__}"


def assert_golden(what: str, name: str, network: FakeNetwork, config: FakeConfig) -> None:
    """Compare the network with a golden file. TRTSPEC_GOLDEN=1 in the environment writes the file anew.

    Another exporter may write other nodes for the same step; then the test is skipped.
    """
    text, file = f"{what}; {MADE_WITH}\n{summary(network, config)}", GOLDEN / name
    if os.environ.get("TRTSPEC_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    golden = file.read_text(encoding="utf-8")
    if golden.split("\n")[0] != text.split("\n")[0]:
        pytest.skip(f"recorded with {golden.split(chr(10))[0].partition('; ')[2]}; here is {MADE_WITH}")
    assert text == golden
