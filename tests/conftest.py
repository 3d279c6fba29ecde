"""Settings of all tests: one thread, no cache of engines, no Hub, and a stand-in for a GPU.

Models are tiny, and two pools of threads on few cores would only wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.async_stand_in import HostQueue, random_delay

os.environ["TRTSPEC_CACHE"] = "off"  # starts from a checkpoint run op by op, unless a test says otherwise
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once; tests use no server but their own


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


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
