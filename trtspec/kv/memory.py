"""Memory that kernels stream through: in huge pages, as TLB misses cost up to a tenth of the bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from ctypes import c_char, c_int, c_size_t, c_void_p

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_AT_ONCE = 2**23  # bytes: for so long the process waits that maps or unmaps something


def huge_pages(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes, in huge pages where the system has them: private, as shared memory has none.

    It becomes resident as it is first touched. OSError where the system does not give it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap) -> None:
    """Make it resident, as it is, in a thread of its own: the system takes a second to find 2 GB.

    Where the system cannot do that, and where it is little, it becomes resident as it is first touched.
    """
    if sys.platform == "linux" and len(memory) > _AT_ONCE:
        threading.Thread(target=_populate, args=(weakref.ref(memory),), name="trtspec-populate", daemon=True).start()


def _populate(reference: weakref.ref[mmap.mmap]) -> None:
    """Until it is done, or nobody else wants the memory."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (c_void_p, c_size_t, c_int), c_int
    start, more = 0, True
    while more and (memory := reference()) is not None:
        count = min(_AT_ONCE, len(memory) - start)
        failed = madvise(ctypes.addressof(c_char.from_buffer(memory)) + start, count, _POPULATE_WRITE)
        start += count
        more = not failed and start < len(memory)
        del memory
