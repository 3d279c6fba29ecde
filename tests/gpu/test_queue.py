"""The queue of work on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.gpu.gpu import CUDA
from trtspec.backends.cuda.device import CudaQueue

pytestmark = pytest.mark.gpu


class _Engine:
    """Holds what an engine holds, in a cycle that only garbage collection frees."""

    def __init__(self) -> None:
        self.queue, self.numbers, self.me = CudaQueue(), torch.zeros(1000, device=CUDA), self
        self.replay = self.queue.capture(self.work)
        self.there = self.queue.pinned(4000)
        self.queue.submit(lambda: self.there.view(torch.float32).copy_(self.numbers, non_blocking=True))

    def work(self) -> None:
        self.numbers.add_(1)


@pytest.mark.parametrize("threshold", [700, 1])
def test_an_engine_that_is_gone_does_not_end_a_capture(threshold: int) -> None:
    """Python collects garbage in the middle of a capture, unless that is off."""
    queue, numbers = CudaQueue(), torch.zeros(1000, device=CUDA)
    kept: list[list[int]] = []

    def work() -> None:
        numbers.mul_(2)
        kept.extend([number] for number in range(2000))  # more objects than Python lets pass without a collection
        numbers.add_(1)

    queue.capture(work)
    before = gc.get_threshold()
    try:
        for _ in range(5):
            for _ in range(3):
                _Engine()
            gc.set_threshold(threshold, 1, 1)
            numbers.zero_()
            replay = queue.capture(work)
            gc.set_threshold(*before)
            queue.submit(replay)
            queue.mark().wait()
            assert numbers.eq(7).all()  # two warm-ups and the replay
    finally:
        gc.set_threshold(*before)
