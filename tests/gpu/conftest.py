"""Skips what wants a GPU where there is none, and gives models to both the GPU and what stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conformance import make_models
from tests.gpu.gpu import WHY_NOT
from trtspec.ops import load_plugins


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Of tests marked so: there is a GPU, and our kernels serve on it."""
    if item.get_closest_marker("gpu") is None:
        return
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    assert "triton" in load_plugins(), "no entry point trtspec.plugins: run `make test-gpu`, which makes it"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ and head/: tiny."""
    return make_models(tmp_path_factory.mktemp("models"))
