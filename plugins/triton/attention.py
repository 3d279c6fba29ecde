"""spec_attention, causal and without sinks: one program for a few rows of one request and one head of keys.

Rows of a step attend to each other in the same launch that writes them to the cache. No program reads what another
writes: new keys come from k and v, older ones from the cache. Tiles of keys start at position 0 and have a fixed size,
and what a row does not see adds an exact zero, so that a row's bits depend on its own tokens alone, as long as the GPU
gives a row of a matrix product the same bits wherever it lies in the matrix.

No metadata, however wrong, makes it read or write past a tensor: TensorRT may time a kernel on whatever is in memory.

Within a program the `group` query heads of each row lie side by side in the left matrix of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from trtspec_plugins.triton.launch import float_bits, left_rows

TILE = 32  # keys at a time
NUM_WARPS = 4


@triton.jit
def spec_attention_kernel(
    q,  # [T, Hkv * GROUP, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    k_cache,  # [num_blocks, block_size, Hkv, D]
    v_cache,  # the same
    cu_q_lens,  # [B+1] int32
    kv_lens,  # [B] int32
    block_tables,  # [B, columns] int32
    T,
    B,
    columns,
    num_blocks,
    block_size,
    Hkv,
    scale_bits,  # fp32
    window,
    softcap_bits,  # fp32
    out,  # [T, Hkv * GROUP, D]
    new_k_cache,  # the memory of k_cache
    new_v_cache,  # the memory of v_cache
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    scale = scale_bits.to(tl.float32, bitcast=True)
    softcap = softcap_bits.to(tl.float32, bitcast=True)
    head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)  # of ROWS rows; of its request, once that is found
    request = -1
    for i in range(0, B):
        pieces = tl.cdiv(tl.load(cu_q_lens + i + 1) - tl.load(cu_q_lens + i), ROWS)
        request = tl.where((request < 0) & (piece < pieces), i, request)
        piece = tl.where(request < 0, piece - pieces, piece)
    if request >= 0:
        first = tl.load(cu_q_lens + request)
        last = tl.load(cu_q_lens + request + 1)
        length = tl.load(kv_lens + request)
        committed = length - (last - first)  # positions that were in the cache before this step
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, D_PADDED)
        row = first + piece * ROWS + m // GROUP
        real = (m < ROWS * GROUP) & (row < last) & (row >= 0) & (row < T)
        position = committed + row - first  # [BLOCK_M]
        wide = row.to(tl.int64)
        q_place = (wide * Hkv + head) * GROUP + m % GROUP
        element = real[:, None] & (d < D)[None, :]
        queries = tl.load(q + q_place[:, None] * D + d[None, :], mask=element, other=0.0)

        # The rows of this piece go into the cache; what no column covers, into scratch block 0.
        place = tl.maximum(position, 0)
        column = place // block_size
        covered = real & (position >= 0) & (column < columns)
        block = tl.load(block_tables + request.to(tl.int64) * columns + column, mask=covered, other=0)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
        slot = block.to(tl.int64) * block_size + place % block_size
        once = element & (m % GROUP == 0)[:, None]
        source = (wide * Hkv + head)[:, None] * D + d[None, :]
        target = (slot * Hkv + head)[:, None] * D + d[None, :]
        tl.store(new_k_cache + target, tl.load(k + source, mask=once, other=0.0), mask=once)
        tl.store(new_v_cache + target, tl.load(v + source, mask=once, other=0.0), mask=once)

        top = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        poisoned = tl.zeros((BLOCK_M,), tl.int32)
        sums = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
        end = tl.minimum(length, committed + (piece + 1) * ROWS)
        end = tl.minimum(end, columns * block_size + T)
        for start in range(0, end, TILE):
            key = start + tl.arange(0, TILE)
            old = key < committed
            key_column = key // block_size
            listed = old & (key_column < columns)
            key_block = tl.load(block_tables + request.to(tl.int64) * columns + key_column, mask=listed, other=0)
            key_block = tl.minimum(tl.maximum(key_block, 0), num_blocks - 1)
            key_slot = key_block.to(tl.int64) * block_size + key % block_size
            fresh = first.to(tl.int64) + key - committed
            known = (key < end) & (old | ((fresh >= 0) & (fresh < T)))
            in_cache = (key_slot * Hkv + head) * D
            in_step = (fresh * Hkv + head) * D
            k_row = tl.where(old, k_cache + in_cache, k + in_step)  # [TILE] pointers
            v_row = tl.where(old, v_cache + in_cache, v + in_step)
            inside = known[:, None] & (d < D)[None, :]
            keys = tl.load(k_row[:, None] + d[None, :], mask=inside, other=0.0)
            values = tl.load(v_row[:, None] + d[None, :], mask=inside, other=0.0)
            # 0 * NaN is NaN: values that are not finite go, and mark the rows that see them.
            broken = tl.max((tl.abs(values.to(tl.float32)) <= 3.4028234e38).to(tl.int32) ^ 1, axis=1)  # [TILE]
            values = tl.where(broken[:, None] != 0, 0.0, values).to(v.dtype.element_ty)

            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            if softcap > 0:
                # tanh(x) = 1 - 2 / (e^2x + 1), which is right at both ends
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
            seen = (key[None, :] <= position[:, None]) & real[:, None]
            if window > 0:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            poisoned = poisoned | tl.max((seen & (broken != 0)[None, :]).to(tl.int32), axis=1)
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            sums = sums * shrink[:, None]
            sums += tl.dot(weights.to(v.dtype.element_ty), values, input_precision="ieee")
            top = higher
        result = sums / total[:, None]
        result = tl.where(poisoned[:, None] != 0, float("nan"), result)
        tl.store(out + q_place[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=element)


def spec_attention_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Launch it on contiguous tensors: [T, Hq, D], and the caches changed. See trtspec/ops/attention.py.

    Weights are rounded to the values' dtype before they are multiplied with them, the reference's are fp32.
    """
    T, Hq, D = q.shape
    num_blocks, block_size, Hkv, _ = k_cache.shape
    B, group = kv_lens.shape[0], Hq // Hkv
    out, width = torch.empty_like(q), left_rows(group)
    spec_attention_kernel[(triton.cdiv(T, width // group) + B, Hkv)](
        q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables,
        T, B, block_tables.shape[1], num_blocks, block_size, Hkv, float_bits(scale), window, float_bits(softcap),
        out, k_cache, v_cache,
        D=D, D_PADDED=max(16, triton.next_power_of_2(D)), GROUP=group, BLOCK_M=width, TILE=TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
