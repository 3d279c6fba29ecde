"""Memory that kernels stream through: in huge pages, as TLB misses cost up to a tenth of the bandwidth."""

from __future__ import annotations

import contextlib
import mmap


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
