"""Skips tests that need a GPU if there is none, and makes models for the GPU and for its stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conformance import make_models
from tests.gpu.gpu import WHY_NOT
from trtspec.ops import load_plugins


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` without a GPU, and check that our kernels run on the GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    assert "triton" in load_plugins(), "no entry point trtspec.plugins: run `make test-gpu`, which makes it"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/, draft/ and head/, all tiny."""
    return make_models(tmp_path_factory.mktemp("models"))
