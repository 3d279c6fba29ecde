"""Memory that kernels stream through, and memory of a step's tensors.

The former is in huge pages, as TLB misses cost up to a tenth of the bandwidth. The latter is kept for the next step.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_char, c_int, c_size_t, c_void_p

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_AT_ONCE = 2**21  # bytes of one madvise call, during which no other thread can map or unmap memory

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, in glibc's malloc.h
_KEPT, _LARGEST = 2**28, 2**25  # bytes; glibc takes no larger mmap threshold


def keep_freed_memory() -> None:
    """Make this process keep up to 256 MB of freed memory, in pieces of up to 32 MB.

    Every step makes tensors of the same sizes. If the C library returns their pages and takes new ones, a prefill step
    takes 6 % longer (1,405 tokens, two cores of an Intel Xeon). This does nothing without glibc, or if the environment
    has settings of its own (MALLOC_*_, GLIBC_TUNABLES).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ) or sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def huge_pages(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes, in huge pages where the system has them. It is private, as shared memory has none.

    It becomes resident when it is first touched. OSError if the system does not give it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap, starts: Sequence[int]) -> None:
    """Make the memory resident, contents unchanged, in a thread of its own: 2 GB take the system a second or more.

    starts: first byte of each part, ascending. The beginnings of the parts are needed first.
    If the system cannot do that, if it gives no thread, or if the memory is small, it becomes resident when it is first
    touched.
    """
    if sys.platform == "linux" and len(memory) > _AT_ONCE:
        arguments = weakref.ref(memory), _pieces([*starts, len(memory)])
        with contextlib.suppress(RuntimeError):  # no thread
            threading.Thread(target=_populate, args=arguments, name="trtspec-populate", daemon=True).start()


def _pieces(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pieces of the parts between these bytes, the beginnings of all parts first.

    Each is (offset in its part, first byte rounded down to a page, end).
    """
    parts = list(itertools.pairwise(bounds))
    for offset in range(0, max(end - start for start, end in parts), _AT_ONCE):
        for start, end in parts:
            if start + offset < end:
                first = (start + offset) // mmap.PAGESIZE * mmap.PAGESIZE
                yield offset, first, min(start + offset + _AT_ONCE, end)


def _populate(reference: weakref.ref[mmap.mmap], pieces: Iterable[tuple[int, int, int]]) -> None:
    """Make `pieces` resident, one after the other, as long as other code holds the memory.

    When the beginnings of all parts are resident, other threads are at work. This one sleeps half of the time from then
    on.
    """
    madvise = ctypes.CDLL(None).madvise  # mmap's own madvise would block other Python threads
    madvise.argtypes, madvise.restype = (c_void_p, c_size_t, c_int), c_int
    for offset, first, end in pieces:
        begin = time.perf_counter()
        if (memory := reference()) is None or madvise(
            ctypes.addressof(c_char.from_buffer(memory)) + first, end - first, _POPULATE_WRITE
        ):
            return
        del memory
        if offset:
            time.sleep(time.perf_counter() - begin)
