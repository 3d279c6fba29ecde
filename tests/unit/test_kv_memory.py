"""Memory of the KV cache: zeros at once, resident soon, and given back while that goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trtspec.core import KVSpec
from trtspec.kv.pool import allocate_layers, kv_nbytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts pages by Linux's /proc/self/statm")
PAGE, LAYERS = 4096, [KVSpec(2, 64)] * 4


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def populating() -> bool:
    return any(thread.name == "trtspec-populate" for thread in threading.enumerate())


def test_it_becomes_resident_and_keeps_what_is_written_meanwhile() -> None:
    before = resident()
    layers = allocate_layers(LAYERS, 8000, 16, torch.float32)
    written = layers[-1][1]
    written.fill_(3.0)
    wait_for(lambda: not populating())
    assert resident() - before > 0.9 * kv_nbytes(layers)
    assert written.eq(3).all()
    assert not any(tensor.any() for layer in layers for tensor in layer if tensor is not written)


def test_dropped_memory_is_given_back() -> None:
    before = resident()
    layers = allocate_layers(LAYERS, 40000, 16, torch.float32)
    size = kv_nbytes(layers)
    del layers
    wait_for(lambda: not populating())
    assert resident() - before < 0.5 * size
