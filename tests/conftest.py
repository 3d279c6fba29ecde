"""For all tests: one thread, as models are tiny and two pools of threads on few cores only wait for each other; no
cache of engines, no Hub; and what stands in for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.async_stand_in import HostQueue, random_delay

os.environ["TRTSPEC_CACHE"] = "off"  # what starts from a checkpoint runs op by op, unless a test says otherwise
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, by huggingface_hub: tests ask no server but their own


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
    """What backend "cuda" takes for a GPU meanwhile."""
    queue = HostQueue(random_delay(1, 0.002))
    monkeypatch.setattr("trtspec.build.wiring.open_gpu", lambda: queue.device)
    monkeypatch.setattr("trtspec.build.wiring.CudaQueue", lambda: queue)
    monkeypatch.setattr("trtspec.build.wiring.free_memory", lambda device: 10**9)
    return queue
