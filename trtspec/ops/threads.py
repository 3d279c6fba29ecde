"""Threads of the kernels beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trtspec.ops.dispatch import has_op


@contextmanager
def kernel_threads() -> Iterator[None]:
    """Within it the CPU kernels that this thread calls share their work out as in compiled graphs: among threads of
    their own, as many as torch.get_num_threads(). Torch's own ops run in the calling thread alone.

    OpenMP's threads, which they would wake, spin beside the kernels' own, and every op waits for all of them: with
    another busy process on the machine a step takes many times as long. Without those kernels it does nothing.
    """
    threads = torch.get_num_threads()
    if threads == 1 or not has_op("trtspec_threads", "use_own"):
        yield
        return
    before = torch.ops.trtspec_threads.use_own(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.ops.trtspec_threads.use_own(before)
