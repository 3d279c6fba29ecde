"""The library's own threads do every piece of an op once, whichever thread does it and whatever else runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import kernel_threads, load_plugins, packed_linear, process_logits, spec_attention_, spec_sample
from trtspec.ops.packing import pack_panels

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

NONE = torch.empty(0)
OUT_FEATURES, IN_FEATURES = 700, 512  # 22 chunks of one panel
VOCAB = 20000


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    before = torch.ops.trtspec_threads.use_own(count)
    try:
        yield
    finally:
        torch.ops.trtspec_threads.use_own(before)


def matrix(seed: int) -> Tensor:
    return pack_panels(torch.randn(OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(seed)))


WEIGHTS = [matrix(seed) for seed in range(5)]


def linear(rows: int) -> Tensor:
    """Run several linears one after another, as in a step."""
    x = torch.randn(rows, IN_FEATURES, generator=torch.Generator().manual_seed(rows))
    return torch.stack([packed_linear(x, weight, out_features=OUT_FEATURES) for weight in [*WEIGHTS, *WEIGHTS]])


def attention(rows: int) -> Tensor:
    """Run attention for two requests with `rows` rows each, one of them with a long context."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(2 * rows, heads, 64, generator=generator) for heads in (8, 2, 2))
    k_cache, v_cache = (torch.randn(80, 16, 2, 64, generator=generator) for _ in "kv")
    lens = [torch.tensor(values, dtype=torch.int32) for values in ([0, rows, 2 * rows], [rows, rows + 500])]
    tables = torch.arange(80, dtype=torch.int32).reshape(2, 40)
    out = spec_attention_(q, k, v, k_cache, v_cache, *lens, tables, torch.empty(0, dtype=torch.int32), NONE, 0.125)
    return torch.cat((out.flatten(), k_cache.flatten(), v_cache.flatten()))


def sampling(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))
    positions, ones = torch.arange(rows), torch.ones(rows)
    nothing = [torch.empty(0, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32)]
    ints, longs, floats = nothing
    groups = (ints, longs, floats, ints, floats, ints, longs, ints, 0.7 * ones, ints, 0.9 * ones, floats)
    processed = process_logits(logits, positions, *groups)
    tokens = spec_sample(processed, torch.zeros(rows, dtype=torch.bool), positions, positions, longs)
    return torch.cat((processed.flatten(), tokens.float()))


OPS = (linear, attention, sampling)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(OPS), st.integers(1, 40), st.integers(1, 5))
def test_the_bits_are_those_of_openmp(op: Callable[[int], Tensor], rows: int, threads: int) -> None:
    expected = op(rows)
    with own_threads(threads):
        for _ in range(3):
            assert torch.equal(op(rows), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 6), st.integers(-1, 300))
def test_every_piece_is_done_once_or_its_error_arrives(count: int, threads: int, failing: int) -> None:
    with own_threads(threads):
        if 0 <= failing < count:
            with pytest.raises(RuntimeError, match=f"piece {failing} failed"):
                torch.ops.trtspec_probe.count_pieces(count, failing)
        assert torch.ops.trtspec_probe.count_pieces(count, -1) == [1] * count  # the threads work as before


GROWING = """
import os, sys, torch
from trtspec.ops import load_plugins
load_plugins()
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
for count in range(1, 30):
    torch.ops.trtspec_probe.count_pieces(count, -1)
assert len(os.listdir("/proc/self/task")) - before == 7, len(os.listdir("/proc/self/task")) - before
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
def test_one_team_serves_ops_of_every_size() -> None:
    done = subprocess.run([sys.executable, "-c", GROWING], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_many_callers_at_once() -> None:
    """One caller has the threads, and the others compute alone."""
    expected = {op: op(9) for op in OPS}

    def call(index: int) -> bool:
        op = OPS[index % len(OPS)]
        with own_threads(3):
            return all(torch.equal(op(9), expected[op]) for _ in range(20))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(12)))


def test_next_to_busy_processes() -> None:
    """Bits stay the same next to busy processes.

    Threads lose their processors within chunks here, and are not used for a while after that.
    """
    expected = linear(3)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with own_threads(4):
            assert all(torch.equal(linear(3), expected) for _ in range(200))
    finally:
        for process in busy:
            process.kill()
            process.wait()


# Tensors are small, because OpenMP, which torch itself uses for large ones, does not survive a fork.
FORKING = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.plugins.test_cpu_threads import linear, own_threads
with own_threads(3):
    expected = linear(3)
    child = os.fork()
    same = torch.equal(linear(3), expected)
    if child == 0:
        os._exit(0 if same else 1)
sys.exit(0 if same and os.waitpid(child, 0)[1] == 0 else 1)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, root], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_kernels_have_threads_and_torch_has_none() -> None:
    """Kernels have threads and torch none, in the calling thread alone, until the context ends, even by an error."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = linear(5)
        with kernel_threads(), ThreadPoolExecutor(1) as another:
            assert torch.get_num_threads() == 1
            assert torch.ops.trtspec_threads.use_own(3) == 3  # the number before
            assert torch.equal(linear(5), expected)
            with kernel_threads():  # torch has one thread, so nothing changes
                assert torch.ops.trtspec_threads.use_own(3) == 3
            assert another.submit(torch.ops.trtspec_threads.use_own, 0).result() == 0
        with pytest.raises(KeyError), kernel_threads():
            raise KeyError
        assert torch.get_num_threads() == 3
        assert torch.ops.trtspec_threads.use_own(0) == 0
    finally:
        torch.set_num_threads(before)


def test_weights_that_are_gone_are_expected_without_harm() -> None:
    """A linear fetches ahead the weight that came next the last time, even if its memory is gone."""
    x = torch.randn(4, IN_FEATURES, generator=torch.Generator().manual_seed(1))
    first = WEIGHTS[0]

    def output(weight: Tensor) -> Tensor:
        return packed_linear(x, weight, out_features=OUT_FEATURES)

    expected = [output(WEIGHTS[0]), output(WEIGHTS[1])]
    with own_threads(2):
        for _ in range(50):
            gone = torch.zeros(64 << 20, dtype=torch.uint8)  # so large that its pages are returned
            other = gone[: first.nbytes].view(first.dtype).reshape(first.shape)
            output(first)
            output(other)
            del gone, other
            assert torch.equal(output(first), expected[0])  # the memory that it now expects is gone
            assert torch.equal(output(WEIGHTS[1]), expected[1])
