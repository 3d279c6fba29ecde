"""kv_compact: a program has a request and some elements of a row. It gathers these from all rows before it stores.

A program owns its elements of every row of its request, so rows may move over each other in any order. No other program
reads or writes what it moves. Its threads do wait for each other between loading and storing.

No metadata, however wrong, makes it read or write past a tensor. Positions that a table does not cover lie in scratch
block 0. Padding is not written at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from trtspec_plugins.triton.launch import path_tile

NUM_WARPS = 4


@triton.jit
def _slots(block_tables, request, positions, wanted, columns, num_blocks, block_size):
    """Flat cache slots of int64 positions; row 0 of scratch if there is no such position."""
    place = tl.maximum(positions, 0)
    column = place // block_size
    covered = wanted & (positions >= 0) & (column < columns)
    block = tl.load(block_tables + request * columns + column, mask=covered, other=0)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
    return block.to(tl.int64) * block_size + place % block_size


@triton.jit
def kv_compact_kernel(
    k_cache,  # [num_blocks, block_size, width]
    v_cache,  # the same
    block_tables,  # [B, columns] int32
    starts,  # [B] int32
    path,  # [B, L] int64
    columns,
    num_blocks,
    block_size,
    width,  # elements of a row: Hkv * D
    L,
    new_k_cache,  # the memory of k_cache
    new_v_cache,  # the memory of v_cache
    ROWS: tl.constexpr,  # at least L
    ELEMENTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    i = tl.arange(0, ROWS)
    step = tl.load(path + request * L + i, mask=i < L, other=-1)  # [ROWS]
    start = tl.load(starts + request).to(tl.int64)
    real = step >= 0
    source = _slots(block_tables, request, start + step, real, columns, num_blocks, block_size)
    target = _slots(block_tables, request, start + i, real, columns, num_blocks, block_size)
    inside = real[:, None] & (element < width)[None, :]
    here = source[:, None] * width + element[None, :]
    there = target[:, None] * width + element[None, :]
    keys = tl.load(k_cache + here, mask=inside, other=0)
    values = tl.load(v_cache + here, mask=inside, other=0)
    tl.debug_barrier()  # the threads that store a row are not those that load it
    tl.store(new_k_cache + there, keys, mask=inside)
    tl.store(new_v_cache + there, values, mask=inside)


def kv_compact_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """The op of trtspec/ops/compact.py, on contiguous caches, which it changes."""
    num_blocks, block_size, Hkv, D = k_cache.shape
    (B, L), width = path.shape, Hkv * D
    rows, elements = path_tile(L)
    kv_compact_kernel[(B, triton.cdiv(width, elements))](
        k_cache, v_cache, block_tables.contiguous(), starts.contiguous(), path.contiguous(),
        block_tables.shape[1], num_blocks, block_size, width, L,
        k_cache, v_cache,
        ROWS=rows, ELEMENTS=elements, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
