"""spec_attention: append K/V to a paged cache, then attend, with causal or tree masks, sinks, window and softcap.

A row's bits depend on its own tokens and positions alone, whatever other rows share the launch:

- Keys are cut in chunks at fixed positions (chunk_start), and a chunk in tiles of a fixed size from its start. A chunk
  is reduced alone to a highest score, a sum of weights and a sum of weighted values. Chunks are merged in order.
- Keys that a row does not see add an exact zero. A chunk of which a row sees nothing does not change the row's result.
  So neighbours that see further do not matter.
- Matrix products add in the order of keys and of head elements, whatever their size: they are mma.sync instructions.
  From 64 rows in 4 warps on, Triton uses wgmma (sm_90) or tcgen05 (sm_100), which may add in another order. So a
  program has at most 32 rows, for long prompts too. Weights are summed by a product as well: a reduction over a tile's
  columns goes along threads and warps, whose layout follows from the number of rows.
- Multiplications and additions are not fused (enable_fp_fusion), as compilers may fuse them differently in two kernels.

With draft trees, a program has one row alone, as rows of other paths see other keys at the same positions. It reads the
keys of the row's path in the order of their positions.

Two forms give the same bits. With many rows, a program goes through all chunks of its rows. With few rows, each chunk
has a program of its own, which leaves its result in scratch memory, and a second kernel merges the results.

No program reads what another writes: the keys of this step's rows come from k and v, older ones from the cache.
No metadata, however wrong, makes it read or write past a tensor: TensorRT may time a kernel on arbitrary memory
contents.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from trtspec_plugins.triton.attention_merge import (
    NOTHING,
    chunk_start,
    finish,
    last_begun,
    merge,
    merge_chunks_kernel,
    tree_of,
)
from trtspec_plugins.triton.launch import (
    CHUNK,
    MOST_SCRATCH,
    SPLIT_BELOW,
    attention_options,
    attention_shape,
    float_bits,
    left_rows,
)

_HIGHEST_FLOAT = tl.constexpr(3.4028234e38)


@triton.jit(do_not_specialize=["T", "B", "columns", "num_blocks", "words", "entries", "chunks"])
def spec_attention_kernel(
    q,  # [T, Hkv * GROUP, D], rows q_stride apart
    k,  # [T, Hkv, D], rows k_stride apart
    v,  # [T, Hkv, D], rows v_stride apart
    k_cache,  # [num_blocks, block_size, Hkv, D]
    v_cache,  # the same
    cu_q_lens,  # [B+1] int32
    kv_lens,  # [B] int32
    block_tables,  # [B, columns] int32
    tree_mask,  # [T, words] int32, or None
    sinks,  # [Hkv * GROUP], or None
    tree_base,  # [B] int32, or None without trees
    ancestors,  # [T, entries] int32, or None
    T,
    B,
    columns,
    num_blocks,
    block_size,
    Hkv,
    q_stride,
    k_stride,
    v_stride,
    scale_bits,  # bits of an fp32 number
    window,
    softcap_bits,  # bits of an fp32 number, or None
    words,  # None without a tree mask
    entries,  # None without trees
    chunks,  # of the scratch tensors; None if these are None
    out,  # [T, Hkv * GROUP, D]
    new_k_cache,  # the memory of k_cache
    new_v_cache,  # the memory of v_cache
    tops,  # [T, Hkv * GROUP, chunks] fp32 scratch, or None: each program goes through all chunks
    totals,  # the same
    partials,  # [T, Hkv * GROUP, chunks, D] fp32 scratch, or None
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes; rows of keys and values begin at multiples of it
    ENTRIES: tl.constexpr,  # a power of two, at least `entries`
):
    # The left matrix of a program is up to BLOCK_M consecutive (row, query head) pairs of one request and KV head; with
    # trees, those of one row.
    scale = scale_bits.to(tl.float32, bitcast=True)
    head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    if ancestors is None:
        request = last_begun(cu_q_lens, B, piece, GROUP, BLOCK_M, 1)
    else:
        own = piece // ((GROUP + BLOCK_M - 1) // BLOCK_M)  # the program's row
        request = last_begun(cu_q_lens, B, own, 1, 1, 0)
    if request < 0:
        return
    first = tl.load(cu_q_lens + request)
    last = tl.load(cu_q_lens + request + 1)
    length = tl.load(kv_lens + request)
    if ancestors is None:
        pair = (piece - first * GROUP // BLOCK_M - request) * BLOCK_M  # first one, counted within the request
    else:
        pair = (own - first) * GROUP + piece % ((GROUP + BLOCK_M - 1) // BLOCK_M) * BLOCK_M
    if pair >= (last - first) * GROUP:
        return
    committed = length - (last - first)  # positions that were in the cache before this step
    m = pair + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PADDED)
    row = first + m // GROUP
    real = (row < last) & (row >= 0) & (row < T)
    place = committed + m // GROUP  # [BLOCK_M] of the row itself
    position = place  # of its token
    if ancestors is not None:
        real = real & (row == own)
        base, depth = tree_of(tree_base, ancestors, request, own, entries, ENTRIES)
        position = tl.zeros_like(place) + tl.where(depth > 0, base + depth - 1, committed + own - first)
    wide = row.to(tl.int64)
    query_head = head * GROUP + m % GROUP
    element = real[:, None] & (d < D)[None, :]
    queries = tl.load(q + (wide * q_stride + query_head * D)[:, None] + d[None, :], mask=element, other=0.0)
    table = block_tables + request.to(tl.int64) * columns
    k_old, v_old, k_new, v_new = k_cache + head * D, v_cache + head * D, k + head * D, v + head * D

    if tl.program_id(2) == 0:
        # Write the rows of this piece to the cache. Rows that no column covers go to scratch block 0.
        known_place = tl.maximum(place, 0)
        column = known_place // block_size
        covered = real & (place >= 0) & (column < columns)
        block = tl.load(table + column, mask=covered, other=0)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
        slot = block.to(tl.int64) * block_size + known_place % block_size
        once = element & (m % GROUP == 0)[:, None]
        target = ((slot * Hkv + head) * D)[:, None] + d[None, :]
        in_k = (wide * k_stride + head * D)[:, None] + d[None, :]
        in_v = (wide * v_stride + head * D)[:, None] + d[None, :]
        tl.store(new_k_cache + target, tl.load(k + in_k, mask=once, other=0.0), mask=once)
        tl.store(new_v_cache + target, tl.load(v + in_v, mask=once, other=0.0), mask=once)

    # Keys begin .. end - 1 are those that some row of the piece may see.
    if ancestors is None:
        first_position, end = committed + pair // GROUP, committed + (pair + BLOCK_M - 1) // GROUP + 1
    else:
        first_position = tl.max(position)
        end = first_position + 1
    begin = tl.maximum(tl.where(window > 0, first_position - window, -1) + 1, 0)
    end = length if tree_mask is not None else tl.minimum(length, end)
    end = tl.minimum(end, columns * block_size + T)
    lowest = tl.where(window > 0, position - window, -1)  # [BLOCK_M]; a row sees keys above it
    highest = position if tree_mask is None else tl.zeros_like(position) + (end - 1)  # and up to this one

    ones = tl.full((TILE, 16), 1.0, v.dtype.element_ty)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
    chunk = tl.program_id(2)
    start = chunk_start(chunk, CHUNK)
    if partials is not None:
        start = tl.where(chunk_start(chunk + 1, CHUNK) <= begin, end, start)  # before all windows: never merged
    while start < end:
        stop = chunk_start(chunk + 1, CHUNK)
        begin_tile = tl.maximum(start, begin // TILE * TILE)
        end_tile = tl.minimum(stop, end)
        chunk_top = tl.full((BLOCK_M,), NOTHING, tl.float32)
        chunk_total = tl.zeros((BLOCK_M, 16), tl.float32)  # 16 equal columns
        chunk_sums = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
        # 0 * NaN is NaN. If sums are not finite, the chunk is reduced again (CLEAN). Then values that are not finite
        # are cleared, and the total of a row that sees one becomes NaN. In the usual case this costs nothing.
        for CLEAN in tl.static_range(2):
            if CLEAN:
                broken_sums = tl.max((tl.abs(chunk_sums) <= _HIGHEST_FLOAT).to(tl.int32) ^ 1)
                if broken_sums != 0:
                    chunk_top = tl.full((BLOCK_M,), NOTHING, tl.float32)
                    chunk_total = tl.zeros((BLOCK_M, 16), tl.float32)
                    chunk_sums = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
                else:
                    end_tile = begin_tile
            for tile in tl.range(begin_tile, end_tile, TILE, num_stages=1 if CLEAN else 5):
                key = tile + tl.arange(0, TILE)
                key_place = key
                if ancestors is not None:
                    index = key - base
                    of_tree = (index >= 0) & (index < depth)
                    entry = tl.load(ancestors + own.to(tl.int64) * entries + index, mask=of_tree, other=0)
                    key_place = tl.maximum(tl.where(of_tree, base + entry, key), 0)
                old = key_place < committed
                key_column = key_place // block_size
                listed = old & (key_column < columns)
                key_block = tl.load(table + key_column, mask=listed, other=0)
                key_block = tl.minimum(tl.maximum(key_block, 0), num_blocks - 1)
                # Slots are counted in 32 bits, their elements in 64.
                slot = (key_block * block_size + key_place % block_size).to(tl.int64) * (Hkv * D)
                fresh = first + key_place - committed  # may wrap around if the metadata is wrong
                known = (key < end) & (old | ((fresh >= 0) & (fresh < T)))
                k_row = tl.where(old, k_old + slot, k_new + fresh.to(tl.int64) * k_stride)  # [TILE] pointers
                v_row = tl.where(old, v_old + slot, v_new + fresh.to(tl.int64) * v_stride)
                inside = known[:, None] & (d < D)[None, :]
                keys = tl.load(tl.multiple_of(k_row, ALIGN)[:, None] + d[None, :], mask=inside, other=0.0)
                values = tl.load(tl.multiple_of(v_row, ALIGN)[:, None] + d[None, :], mask=inside, other=0.0)

                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
                if softcap_bits is not None:
                    softcap = softcap_bits.to(tl.float32, bitcast=True)
                    if softcap > 0:
                        # tanh(x) = 1 - 2 / (e^2x + 1), which is right at both ends
                        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
                seen = (key[None, :] > lowest[:, None]) & (key[None, :] <= highest[:, None])
                if tree_mask is not None:  # noqa: SIM102 (known when it is compiled, unlike the next)
                    if tile + TILE > committed:  # the tile has keys of this step's rows
                        index = key - committed  # among the request's new rows
                        bits = tl.zeros((BLOCK_M, TILE), tl.int32)
                        for i in tl.static_range((TILE + 31) // 32 + 1):  # words that may hold a tile's bits
                            word = tl.maximum(tile - committed, 0) // 32 + i
                            in_word = tree_mask + row * words + tl.minimum(word, words - 1)  # [BLOCK_M] pointers
                            mask = tl.load(in_word, mask=real, other=0)
                            bits = tl.where((index // 32 == word)[None, :], mask[:, None], bits)
                        allowed = (bits >> (tl.maximum(index, 0) % 32)[None, :]) & 1 != 0
                        seen = seen & (allowed | (index < 0)[None, :])
                scores = tl.where(seen, scores, float("-inf"))
                higher = tl.maximum(chunk_top, tl.max(scores, axis=1))
                weights = tl.exp(scores - higher[:, None]).to(v.dtype.element_ty)
                shrink = tl.exp(chunk_top - higher)[:, None]
                chunk_total = tl.dot(weights, ones, acc=chunk_total * shrink, input_precision="ieee")
                if CLEAN:
                    broken = tl.max((tl.abs(values.to(tl.float32)) <= _HIGHEST_FLOAT).to(tl.int32) ^ 1, axis=1)
                    values = tl.where(broken[:, None] != 0, 0.0, values).to(v.dtype.element_ty)
                    spoiled = tl.max((seen & (broken != 0)[None, :]).to(tl.int32), axis=1)
                    chunk_total += tl.where(spoiled != 0, float("nan"), 0.0)[:, None]
                chunk_sums = tl.dot(weights, values, acc=chunk_sums * shrink, input_precision="ieee")
                chunk_top = higher
        one_total = tl.max(chunk_total, axis=1)
        if partials is None:
            top, total, sums = merge(top, total, sums, chunk_top, one_total, chunk_sums)
            chunk += 1
            start = stop
        else:
            entry = (wide * Hkv * GROUP + query_head) * chunks + chunk
            tl.store(tops + entry, chunk_top, mask=real)
            tl.store(totals + entry, one_total, mask=real)
            tl.store(partials + entry[:, None] * D + d[None, :], chunk_sums, mask=element)
            start = end
    if partials is None:
        result = finish(top, total, sums, sinks, query_head)
        to = (wide * Hkv * GROUP + query_head)[:, None] * D + d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=element)


def spec_attention_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    tree_mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    tree_base: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op of trtspec/ops/attention.py: [T, Hq, D]. The caches are changed.

    q, k and v may be slices of one tensor [T, heads, D]; tensors with other strides within a row are copied. Weights
    are rounded to the values' dtype before they are summed and multiplied; the reference's are fp32.

    The form to launch and its width follow from shapes alone, so a CUDA graph may capture the launch: lengths are read
    on the device. Scratch memory of the split form is T * Hq * chunks * (D + 2) * 4 bytes, with as many chunks as cover
    columns * block_size + T tokens. It is at most MOST_SCRATCH: beyond that the other form is launched.
    """
    T, Hq, D = q.shape
    (num_blocks, block_size, Hkv, _), (B, columns) = k_cache.shape, block_tables.shape
    paths = None
    if ancestors is not None and ancestors.numel():
        _check_trees(tree_base, ancestors, tree_mask, T, B)
        paths = ancestors.contiguous()
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("spec_attention_ writes to caches that are contiguous")
    out = q.new_empty(q.shape)
    if T == 0:
        return out
    block_tables, tree_mask = block_tables.contiguous(), tree_mask.contiguous()
    q, k, v = (rows if rows.stride()[1:] == (D, 1) else rows.contiguous() for rows in (q, k, v))
    tree = tree_mask if tree_mask.numel() else None
    sink = sinks if sinks.numel() else None
    group = Hq // Hkv
    block_m = left_rows(group if paths is not None else triton.cdiv(T, B) * group)
    shape = attention_shape(D, group, block_m, q.element_size())

    capacity = columns * block_size + T  # rows that no column covers attend all the same
    chunks = chunks_of(capacity)
    pieces = T * group // block_m + B  # some are empty, as each request begins a piece of its own
    if paths is not None:
        pieces = T * triton.cdiv(group, block_m)
    trees = (None, None) if paths is None else (tree_base, paths)
    widths = (None, 1) if paths is None else (paths.shape[1], triton.next_power_of_2(paths.shape[1]))
    scratch_bytes = T * Hq * chunks * (D + 2) * 4
    full = (triton.cdiv(T * group, block_m) if paths is None else pieces) * Hkv
    split = chunks > 1 and full < SPLIT_BELOW and scratch_bytes <= MOST_SCRATCH
    tops = totals = partials = None
    if split:
        tops, totals = torch.empty(2, T, Hq, chunks, dtype=torch.float32, device=q.device)
        partials = torch.empty(T, Hq, chunks, D, dtype=torch.float32, device=q.device)
    spec_attention_kernel[(pieces, Hkv, chunks if split else 1)](
        q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree, sink, *trees,
        T, B, columns, num_blocks, tl.constexpr(block_size), Hkv, q.stride(0), k.stride(0), v.stride(0),
        float_bits(scale), window, float_bits(softcap) if softcap > 0 else None,
        None if tree is None else tree.shape[1], widths[0], chunks if split else None,
        out, k_cache, v_cache, tops, totals, partials,
        **shape, CHUNK=CHUNK, ALIGN=_alignment(k, v, k_cache, v_cache), ENTRIES=widths[1],
        **attention_options(shape, split, q.element_size()),
    )  # fmt: skip
    if split:
        merge_chunks_kernel[(T, Hq)](
            tops, totals, partials, cu_q_lens, kv_lens, sink, *trees, T, B, chunks, capacity, window, widths[0], out,
            TREE=tree is not None, D=D, D_PADDED=shape["D_PADDED"], CHUNK=CHUNK, ENTRIES=widths[1],
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def chunks_of(length: int) -> int:
    """Number of chunks that begin before `length`."""
    count = 0
    while chunk_start.fn(count, CHUNK) < length:
        count += 1
    return count


def _check_trees(
    tree_base: torch.Tensor | None, ancestors: torch.Tensor, tree_mask: torch.Tensor, T: int, B: int
) -> None:
    """Raise ValueError for trees of other shapes or dtypes than the kernel reads."""
    if tree_base is None or tree_base.dtype != torch.int32 or tree_base.shape != (B,):
        raise ValueError(f"spec_attention: tree_base must be int32 [{B}] where there are ancestors")
    if ancestors.dtype != torch.int32 or ancestors.ndim != 2 or ancestors.shape[0] != T:
        raise ValueError(
            f"spec_attention: ancestors are {ancestors.dtype} {tuple(ancestors.shape)}; want int32 [{T}, D]"
        )
    if tree_mask.numel():
        raise ValueError("spec_attention has tree_mask and ancestors; give one of them")


def _alignment(*tensors: torch.Tensor) -> int:
    """Number of bytes, at most 16, at multiples of which the rows of all heads begin.

    The compiler knows it of single tensors, but not where a pointer into one of two tensors is chosen.
    """
    strides = [stride * tensor.element_size() for tensor in tensors for stride in tensor.stride()[:-1]]
    return math.gcd(16, *strides, *(tensor.data_ptr() for tensor in tensors))
