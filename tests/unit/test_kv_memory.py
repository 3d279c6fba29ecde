"""Memory of the KV cache: it is zeros at once, becomes resident soon, and may be freed meanwhile."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trtspec.core import KVSpec
from trtspec.kv.memory import _populate, huge_pages
from trtspec.kv.pool import allocate_layers, kv_nbytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts pages by Linux's /proc/self/statm")
LAYERS = [KVSpec(2, 64)] * 4


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def populating() -> bool:
    return any(thread.name == "trtspec-populate" for thread in threading.enumerate())


def populates() -> bool:
    """Whether this system populates memory on request, as Linux does from 5.14 on."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        memory.madvise(23)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not populates(), reason="the system has no MADV_POPULATE_WRITE")
def test_it_becomes_resident_and_keeps_what_is_written_meanwhile() -> None:
    before = resident()
    layers = allocate_layers(LAYERS, 8000, 16, torch.float32)
    written = layers[-1][1]
    written.fill_(3.0)
    wait_for(lambda: not populating())
    assert resident() - before > 0.9 * kv_nbytes(layers)
    assert written.eq(3).all()
    assert not any(tensor.any() for layer in layers for tensor in layer if tensor is not written)


def test_memory_that_nobody_wants_is_left_alone() -> None:
    size, given = 2**20, []
    memories = [huge_pages(64 * size)]
    reference = weakref.ref(memories[0])

    def pieces() -> Iterator[tuple[int, int, int]]:
        for first in range(0, 64 * size, size):
            given.append(first)
            if len(given) == 3:
                memories.clear()
            yield 0, first, first + size

    _populate(reference, pieces())
    assert reference() is None
    assert len(given) == 3


FAULTS = """
import resource, sys
import torch
from trtspec.kv.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(64):
        tensors = [torch.empty(3 << 20, dtype=torch.uint8).fill_(1) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.long
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    """64 times 24 MB are 393,216 pages of 4 KB. They fault once, or every time if the environment says so."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("sets options of glibc's malloc")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}

    def faults(**settings: str) -> int:
        command = [sys.executable, "-c", FAULTS]
        done = subprocess.run(command, env=plain | settings, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults() < 4096
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > 100_000
