"""Chunks of keys in spec_attention, and how their results are merged. attention.py says what a chunk is."""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # highest score where nothing is seen: finite, so that differences are finite too


@triton.jit
def chunk_start(chunk, CHUNK: tl.constexpr):
    """The first key of a chunk.

    Chunks double in size after every 16. So a long cache has few (81 up to 131072 tokens, where the first ones have
    256). A short cache, or the end of any, has enough for many programs.
    """
    return CHUNK * (((16 + chunk % 16) << (chunk // 16)) - 16)


@triton.jit
def last_begun(cu_q_lens, B, place, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr):
    """The last request b for which cu_q_lens[b] * GROUP // BLOCK_M + b * STEP is not above `place`; -1 = none."""
    begun = 0
    for start in range(0, B, 128):
        b = start + tl.arange(0, 128)
        begin = tl.load(cu_q_lens + b, mask=b < B, other=0) * GROUP // BLOCK_M + b * STEP
        begun += tl.sum(((b < B) & (begin <= place)).to(tl.int32))
    return begun - 1


@triton.jit
def tree_of(tree_base, ancestors, request, row, entries, ENTRIES: tl.constexpr):
    """(first row of the sequence that belongs to the request's tree, number of entries of a row's path; 0 = causal)."""
    i = tl.arange(0, ENTRIES)
    path = tl.load(ancestors + row.to(tl.int64) * entries + i, mask=i < entries, other=-1)
    return tl.load(tree_base + request), tl.sum((path >= 0).to(tl.int32))


@triton.jit
def merge(top, total, sums, next_top, next_total, next_sums):
    """Merge two chunks in order of position: highest scores [M], sums of weights [M] and of weighted values [M, D]."""
    higher = tl.maximum(top, next_top)
    share, next_share = tl.exp(top - higher), tl.exp(next_top - higher)
    total = total * share + next_total * next_share
    return higher, total, sums * share[:, None] + next_sums * next_share[:, None]


@triton.jit
def finish(top, total, sums, sinks, head):
    """The weighted mean [M, D]. head [M] is the query head, which selects the sink."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        share = tl.exp(top - higher)
        total = total * share + tl.exp(sink - higher)
        sums = sums * share[:, None]
    return sums / total[:, None] + 0.0  # zeros lose their sign, which a zero added for unseen keys may change


@triton.jit(do_not_specialize=["T", "B", "chunks", "capacity", "entries"])
def merge_chunks_kernel(
    tops,  # [T, Hq, chunks] fp32
    totals,  # the same
    partials,  # [T, Hq, chunks, D] fp32
    cu_q_lens,  # [B+1] int32
    kv_lens,  # [B] int32
    sinks,  # [Hq], or None
    tree_base,  # [B] int32, or None without trees
    ancestors,  # [T, entries] int32, or None
    T,
    B,
    chunks,
    capacity,  # number of keys that the chunks cover
    window,
    entries,  # None without trees
    out,  # [T, Hq, D]
    TREE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Merge the chunks of one row and query head in order, in one program.

    It merges the chunks of which spec_attention_kernel left a result. These are all that start before the row's end, as
    the program of the row goes on to the end of its last row.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    request = last_begun(cu_q_lens, B, row, 1, 1, 0)
    if request < 0:
        return
    length = tl.load(kv_lens + request)
    position = length - tl.load(cu_q_lens + request + 1) + row
    if ancestors is not None:
        base, depth = tree_of(tree_base, ancestors, request, row, entries, ENTRIES)
        position = tl.where(depth > 0, base + depth - 1, position)
    lowest = tl.where(window > 0, position - window, -1)
    end = tl.minimum(length if TREE else tl.minimum(position + 1, length), capacity)
    first = 0
    while (first < chunks) & (chunk_start(first + 1, CHUNK) <= lowest + 1):
        first += 1
    count = first
    while chunk_start(count, CHUNK) < end:
        count += 1

    d = tl.arange(0, D_PADDED)[None, :]
    pair = row.to(tl.int64) * tl.num_programs(1) + head + tl.arange(0, 1)  # [1]
    top = tl.full((1,), NOTHING, tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, D_PADDED), tl.float32)
    for chunk in tl.range(first, count, loop_unroll_factor=8):  # so that 8 loads are in flight
        entry = pair * chunks + chunk
        next_sums = tl.load(partials + entry[:, None] * D + d, mask=d < D, other=0.0)
        top, total, sums = merge(top, total, sums, tl.load(tops + entry), tl.load(totals + entry), next_sums)
    result = finish(top, total, sums, sinks, head + tl.arange(0, 1))
    tl.store(out + pair[:, None] * D + d, result.to(out.dtype.element_ty), mask=d < D)
