"""Skips tests that need a GPU if there is none, and makes models for the GPU and for its stand-in."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End a worker of xdist whose GPU a test has lost, as its later tests would fail too; xdist starts another one.

    What happened is in build/gpu-faults.txt.
    """
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and not WHY_NOT:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            folder = item.config.rootpath / "build"
            folder.mkdir(exist_ok=True)
            with (folder / "gpu-faults.txt").open("a", encoding="utf-8") as file:
                file.write(f"{item.nodeid}\n{report.longreprtext}\n\n")
            os._exit(1)
    return report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/, draft/ and head/, all tiny."""
    return make_models(tmp_path_factory.mktemp("models"))
