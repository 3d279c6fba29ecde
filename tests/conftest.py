"""Settings of all tests: one thread, no cache of engines, no Hub, a stand-in for a GPU, and the order of files.

Models are tiny, and two pools of threads on few cores would only wait for each other.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.async_stand_in import HostQueue, random_delay
from trtspec.build import step_times

os.environ["TRTSPEC_CACHE"] = "off"  # starts from a checkpoint run op by op, unless a test says otherwise
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once; tests use no server but their own


SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)
FIRST = [
    "e2e/test_demo.py",
    "e2e/test_engine.py",
    "e2e/test_tensorrt_runtime.py",
    "e2e/test_onnx_engine.py",
    "e2e/test_fp8_checkpoints.py",
    "unit/test_tensorrt_compile.py",
    "e2e/test_tensorrt_network.py",
    "plugins/test_cpu_graphs.py",
    "e2e/test_cache.py",
    "plugins/test_graph_loops.py",
    "serve/test_live_view.py",
    "serve/test_serve_faults.py",
]
"""Files that take longest: they begin first, so that no process is left alone with one at the end."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file whose tests are all slow where slow tests are left out."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    return True if SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: i for i, name in enumerate(FIRST)}
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(1800))
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector pass over what thousands of collected tests and their modules hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that choose draft lengths measure their steps at the start, here in one round instead of five."""
    monkeypatch.setattr(step_times, "ROUNDS", 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> HostQueue:
    """The queue that backend "cuda" uses as its GPU during a test."""
    queue = HostQueue(random_delay(1, 0.002))
    monkeypatch.setattr("trtspec.build.wiring.open_gpu", lambda: queue.device)
    monkeypatch.setattr("trtspec.build.wiring.CudaQueue", lambda: queue)
    monkeypatch.setattr("trtspec.build.wiring.free_memory", lambda device: 10**9)
    return queue
