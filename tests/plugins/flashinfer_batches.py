"""Batches for the FlashInfer plugin, and the plugin registered with a stand-in for the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trtspec_plugins.flashinfer as plugin
from hypothesis import strategies as st
from torch import Tensor
from trtspec_plugins.flashinfer import attention

import trtspec.ops
from tests.contract.flashinfer_api import WRAPPER
from tests.flashinfer_stand_in import FlashInfer

Arguments = dict[str, Any]
APPEND, PLAN, RUN = "append_paged_kv_cache", f"{WRAPPER}.plan", f"{WRAPPER}.run"
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
INF = float("inf")


@contextmanager
def serving(*parts: str, mean_rows: int = 0) -> Iterator[FlashInfer]:
    """Register the parts for tensors on the CPU, for batches with more than mean_rows rows per request."""
    stand_in, usual = FlashInfer(), attention.MEAN_ROWS
    attention.MEAN_ROWS = mean_rows
    library = plugin.register(list(parts), stand_in, "CPU")
    try:
        yield stand_in
    finally:
        attention.MEAN_ROWS = usual
        library._destroy()


def attend(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op -> its result and its caches; the arguments stay unchanged."""
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    return trtspec.ops.spec_attention_(**{**arguments, **caches}), caches["k_cache"], caches["v_cache"]


def batch(widths: list[int], committed: list[int], seed: int = 0, **options: Any) -> Arguments:
    """Return requests of `widths` new rows after `committed` rows each, in blocks scattered over the pool.

    Committed places of the cache hold numbers, all others NaN.
    """
    g = torch.Generator().manual_seed(seed)
    dtype, block_size = options.pop("dtype", torch.float16), options.pop("block_size", 16)
    kv_heads, group, width = options.pop("kv_heads", 2), options.pop("group", 2), options.pop("head_dim", 64)
    lengths = [new + old for new, old in zip(widths, committed, strict=True)]
    B, T, columns = len(widths), sum(widths), max(-(-length // block_size) for length in lengths)
    tables = (torch.randperm(B * columns, generator=g) + 1).view(B, columns)  # block 0 is scratch
    caches = torch.full((2, B * columns + 1, block_size, kv_heads, width), float("nan"), dtype=dtype)
    for table, old in zip(tables, committed, strict=True):
        place = torch.arange(old)
        shape = (2, old, kv_heads, width)
        caches[:, table[place // block_size], place % block_size] = torch.randn(shape, generator=g).to(dtype)

    def random(heads: int) -> Tensor:
        return torch.randn(T, heads, width, generator=g).to(dtype)

    return {
        "q": random(kv_heads * group),
        "k": random(kv_heads),
        "v": random(kv_heads),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cu_q_lens": torch.tensor([0, *widths]).cumsum(0).to(torch.int32),
        "kv_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_tables": tables.to(torch.int32),
        "tree_mask": torch.empty(0, dtype=torch.int32),
        "sinks": torch.empty(0),
        "scale": width**-0.5,
        **options,
    }


def random_trees(widths: list[int], seed: int) -> Tensor:
    """Return packed masks [T, W] of random bits, in which each row sees itself."""
    g = torch.Generator().manual_seed(seed)
    words = -(-max(widths) // 32)
    masks = torch.randint(-(2**31), 2**31, (sum(widths), words), generator=g)
    own = torch.cat([torch.arange(width) for width in widths])
    bit = 1 << (own % 32)
    place = torch.arange(len(own)), own // 32
    masks[place] |= torch.where(bit >= 2**31, bit - 2**32, bit)
    return masks.to(torch.int32)


def check(arguments: Arguments, got: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    bound = 2 * EPSILON[arguments["q"].dtype]  # both round once, from fp32
    assert torch.allclose(got[0].float(), wanted[0].float(), rtol=bound, atol=bound)
    for cache, cache_wanted in zip(got[1:], wanted[1:], strict=True):
        assert torch.equal(cache.nan_to_num(), cache_wanted.nan_to_num())
        assert torch.equal(cache.isnan(), cache_wanted.isnan())


@st.composite
def batches(draw: st.DrawFn) -> Arguments:
    widths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    trees = {"tree_mask": random_trees(widths, draw(st.integers(0, 99)))} if draw(st.booleans()) else {}
    return batch(
        widths,
        [draw(st.integers(0, 70)) for _ in widths],
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from(list(EPSILON))),
        block_size=draw(st.sampled_from([1, 4, 16])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        window=draw(st.sampled_from([0, 0, 1, 7, 40])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        scale=draw(st.sampled_from([0.125, 0.3])),
        **trees,
    )
