"""The CPU kernels' own threads, which exist next to torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trtspec.ops.dispatch import has_op, load_plugins


@contextmanager
def kernel_threads() -> Iterator[None]:
    """Within this context, the CPU kernels that this thread calls use their own threads, as in compiled graphs.

    The kernels use torch.get_num_threads() threads. Torch's own ops run in the calling thread alone. Otherwise they
    would wake OpenMP's threads, which spin while the kernels' threads work, and every op waits for all of these. With
    another busy process on the machine, a step then takes many times as long.

    Without these kernels the context does nothing.
    """
    threads = torch.get_num_threads()
    # a library that cannot serve is loaded all the same, to find that out
    if threads == 1 or not has_op("trtspec_threads", "use_own") or "cpu" not in load_plugins():
        yield
        return
    before = torch.ops.trtspec_threads.use_own(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.ops.trtspec_threads.use_own(before)
