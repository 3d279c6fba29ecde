"""What SpecAttention and KvCompact do, as ONNX functions: the ops of `trtspec.ops`, over caches that stay in place.

The new cache is the result of one ScatterND on the old one: a runtime that gives both the same memory copies nothing.

Attention goes over *runs*: requests that follow each other with as many rows each are computed at once, except that a
long prompt is always alone. A step of generating requests is a single run; in others a `Loop` takes one run after the
other, each with its own number of rows and keys, so that a long prompt does not pad its generating neighbours.

As in the reference, keys are cut in tiles of fixed size, each is reduced alone, and the tiles are added in order. So in
ONNX Runtime a row has the same bits in any batch, for heads of up to 128; longer ones sum in an order that depends on
how many rows there are.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto

from trtspec.backends.onnx.builder import Body, Results, Value

TILE = 128
"""Keys of a tile, at least: it is a whole number of cache blocks. ONNX Runtime's GEMM does not split sums so short."""

LONGEST_IN_RUN = 32
"""Rows of a request up to which it is computed together with others."""


@dataclass(frozen=True)
class _Step:
    """What is the same for all rows. N requests that have rows, T rows, S keys of the longest request, whole tiles."""

    body: Body
    queries: Value  # [T, Hq, D]
    k_cache: Value  # with the new rows
    v_cache: Value
    scale: Value
    softcap: Value
    sinks: Value  # [Hkv, 1, G] fp32, or one -inf
    seen: Value  # [T, S] bool
    tables: Value  # [N, C] int64; its C columns cover S


def spec_attention(absent: Collection[str] = ()) -> FunctionProto:
    """SpecAttention(q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks; scale, window,
    softcap) -> (out, new_k_cache, new_v_cache). tree_mask and sinks may be absent, or zero-size."""
    names = ("q", "k", "v", "k_cache", "v_cache", "cu_q_lens", "kv_lens", "block_tables", "tree_mask", "sinks")
    body = Body("SpecAttention", names, ("scale", "window", "softcap"), absent)
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks = body.inputs
    scale, softcap = (body.attribute(name, AttributeProto.FLOAT) for name in ("scale", "softcap"))
    window = body.attribute("window", AttributeProto.INT)

    # What follows from the step's metadata alone comes first: ONNX Runtime does most of it once for all layers.
    bounds, lens, tables = cu_q_lens.int64(), kv_lens.int64(), block_tables.int64()
    starts, stops = bounds.slice(0, -1, axis=0), bounds.slice(1, 2**62, axis=0)  # [B]
    row = body.arange(bounds.slice(-1, 2**62, axis=0))  # [T]
    request = (stops.at(0) <= row.at(1)).int64().sum(1)  # [T]
    local = row - body.Gather(starts, request)
    end = body.Gather(lens, request)
    position = row - body.Gather(stops, request) + end
    block_size = k_cache.inner_dim(1)
    slots = _slots(body, tables, request, position, block_size)
    new_k = body.ScatterND(k_cache, slots, k)
    new_v = body.ScatterND(v_cache, slots, v)

    present = _one(body.NonZero(stops > starts))  # [N] requests that have rows; N is B but for odd batches
    widths, ends = body.Gather(stops - starts, present), body.Gather(lens, present)  # [N]
    blocks, tile = _tile_size(block_size)
    tiles = _tiles(body.Max(body.ReduceMax(lens, keepdims=0), 1), tile)
    key = body.arange(tiles * tile)  # [S]
    step = _Step(
        body,
        queries=q,
        k_cache=new_k,
        v_cache=new_v,
        scale=scale,
        softcap=softcap,
        sinks=_sinks(body, sinks, k_cache),
        seen=_seen(body, key.at(0), position.at(1), local.at(1), end.at(1), window, tree_mask),
        tables=_widened(body, body.Gather(tables, present), tiles * blocks),
    )

    before, after = widths.slice(0, -1, axis=0), widths.slice(1, 2**62, axis=0)
    breaks = ~body.Equal(before, after) | (after > LONGEST_IN_RUN)
    first = _one(body.NonZero(body.Concat([1], breaks.int64(), axis=0)))  # [runs] where each begins
    first = body.Compress(first, first < widths.dim(0), axis=0)  # none where there are no rows
    stop = body.Concat(first.slice(1, 2**62, axis=0), widths.dim(0), axis=0)

    def run(i: Value, done: Value) -> Value:
        a, b = (body.Reshape(body.Gather(bound, i), [1]) for bound in (first, stop))
        width = body.Gather(widths, a)
        begin = body.Gather(starts, body.Gather(present, a))
        rows = begin, begin + width * (b - a)
        blocks, tile = _tile_size(new_k.inner_dim(1))
        longest = body.ReduceMax(ends.slice(a, b, axis=0), keepdims=1)
        tiles = _tiles(body.Max(longest, 1), tile)
        one = replace(
            step,
            queries=q.slice(*rows, axis=0),
            seen=step.seen.slice(*rows, axis=0).slice(0, tiles * tile, axis=1),
            tables=step.tables.slice(a, b, axis=0).slice(0, tiles * blocks, axis=1),
        )
        return body.Concat(done, _attend(one), axis=0)

    out = body.when(
        body.Equal(first.dim(0), 1),
        lambda: (_attend(step),),
        lambda: (body.loop(body.Reshape(first.dim(0), []), q.slice(0, 0, axis=0), run),),
    )[0]
    return body.function((out, new_k, new_v), ("out", "new_k_cache", "new_v_cache"))


def kv_compact() -> FunctionProto:
    """KvCompact(k_cache, v_cache, block_tables, starts, path) -> (new_k_cache, new_v_cache)."""
    body = Body("KvCompact", ("k_cache", "v_cache", "block_tables", "starts", "path"))
    k_cache, v_cache, block_tables, starts, path = body.inputs
    tables, start, block_size = block_tables.int64(), starts.int64().at(1), k_cache.inner_dim(1)
    real = path >= 0  # [B, L]
    request = body.Expand(body.arange(path.dim(0)).at(1), body.Shape(path))
    source = _slots(body, tables, request, start + body.Max(path, 0), block_size)  # [B, L, 2]
    target = _slots(body, tables, request, start + body.arange(path.dim(1)), block_size)
    target = body.Where(real.at(2), target, 0)  # padding lands in scratch
    caches = [body.ScatterND(cache, target, body.GatherND(cache, source)) for cache in (k_cache, v_cache)]
    return body.function(caches, ("new_k_cache", "new_v_cache"))


def _slots(body: Body, tables: Value, request: Value, position: Value, block_size: Value) -> Value:
    """(block, offset) of each token, [..., 2]; where no column of the table covers it, in scratch block 0."""
    column = body.Div(position, block_size)
    last = tables.dim(1) - 1
    inside = (position >= 0) & (column <= last)
    cell = body.Concat(request.at(-1), body.Min(body.Max(column, 0), last).at(-1), axis=-1)
    block = body.Where(inside, body.GatherND(tables, cell), 0)
    return body.Concat(block.at(-1), (position % block_size).at(-1), axis=-1)


def _tile_size(block_size: Value) -> tuple[Value, Value]:
    """Blocks and keys of a tile. Branches compute it anew (see `Body.constant`): it becomes a constant in each."""
    blocks = (block_size + (TILE - 1)) // block_size
    return blocks, blocks * block_size


def _tiles(longest: Value, tile: Value) -> Value:
    return (longest + tile - 1) // tile


def _widened(body: Body, tables: Value, columns: Value) -> Value:
    """Tables of exactly so many columns; what is missing is scratch, what is cut off nobody sees."""
    missing = body.Max(columns - tables.dim(1), 0)
    scratch = body.Expand(0, body.Concat(tables.dim(0), missing, axis=0))
    return body.Concat(tables, scratch, axis=1).slice(0, columns, axis=1)


def _seen(body: Body, key: Value, position: Value, local: Value, end: Value, window: Value, tree_mask: Value) -> Value:
    """Which of the keys [1, S] each row sees, [T, S] bool; the others are [T, 1]."""

    def tree() -> Value:
        # Bit j of a row's mask is the request's new row j; what is before those is committed and always seen.
        index = key - (position - local)  # [T, S] new row of each key, negative if committed
        new = body.Max(index, 0)
        word = body.Min(new // 32, tree_mask.dim(1) - 1)
        bits = body.GatherElements(tree_mask.int64(), word, axis=1)
        allowed = _bit(body, bits, new % 32)
        return (key < end) & ((index < 0) | allowed)

    seen = key <= position
    if body.has(tree_mask):
        seen = body.maybe(body.Size(tree_mask) > 0, seen, tree)
    return body.maybe(window > 0, seen, lambda: seen & (key > position - window))


def _bit(body: Body, words: Value, index: Value) -> Value:
    """Bit `index` of int64 words, as a boolean."""
    shifted = body.BitShift(words.to(TensorProto.UINT64), index.to(TensorProto.UINT64), direction="RIGHT")
    return body.BitwiseAnd(shifted.int64(), 1) > 0


def _sinks(body: Body, sinks: Value, k_cache: Value) -> Value:
    none = body.constant(np.full((1, 1, 1), -np.inf, np.float32))
    if not body.has(sinks):
        return none
    return body.maybe(body.Size(sinks) > 0, none, lambda: sinks.float32().reshape(k_cache.inner_dim(2), 1, -1))


def _attend(step: _Step) -> Value:
    """Attention of n requests with W rows each, [n * W, Hq, D].

    G = Hq / Hkv query heads share a key head; a request's W * G of them are rows of one matrix.
    """
    body = step.body
    block_size, kv_heads, depth = (step.k_cache.inner_dim(axis) for axis in (1, 2, 3))
    _, tile = _tile_size(block_size)
    n, tiles = step.tables.dim(0), step.seen.dim(1) // tile
    group = step.queries.inner_dim(1) // kv_heads
    queries = (step.queries.float32() * step.scale).reshape(n, -1, kv_heads, group, depth)
    seen = step.seen.reshape(n, -1, tiles, tile)
    # A product with a single column is summed in another order than the same column beside others.
    lonely = body.Equal(group, 1)
    queries, seen = (body.maybe(lonely, x, functools.partial(_with_first_again, x)) for x in (queries, seen))
    width = queries.dim(1)
    per_tile = (n, kv_heads, tiles)
    queries = queries.permute(0, 2, 4, 1, 3).reshape(n, kv_heads, 1, depth, -1)
    seen = seen.permute(0, 2, 1, 3).at(1, 4)  # [n, 1, tiles, W, 1, tile]
    keys, values = (
        body.Gather(cache, step.tables, axis=0)
        .reshape(n, tiles, tile, kv_heads, depth)
        .permute(0, 3, 1, 2, 4)
        .float32()
        for cache in (step.k_cache, step.v_cache)
    )  # [n, Hkv, tiles, tile, D]

    scores = body.MatMul(keys, queries)  # [n, Hkv, tiles, tile, W * G]
    scores = body.maybe(step.softcap > 0.0, scores, lambda: body.Tanh(scores / step.softcap) * step.softcap)
    scores = scores.permute(0, 1, 2, 4, 3).reshape(*per_tile, width, group, tile)
    scores = body.Where(seen, scores, float("-inf"))
    top = body.Max(scores.max(-1, keep=True), -1e30)  # [n, Hkv, tiles, W, G, 1]; a tile nobody sees stays finite
    weights = body.Exp(scores - top)
    total = weights.sum(-1, keep=True)
    weights = weights.reshape(*per_tile, -1, tile)
    partial = body.MatMul(weights, values)  # [n, Hkv, tiles, W * G, D]

    def without_strangers() -> Results:
        # 0 * NaN is NaN: what lies past a request's end, or what a later row holds, must not reach this row.
        broken = body.IsNaN((values - values).sum(-1))  # [n, Hkv, tiles, tile]
        clean = body.MatMul(weights, body.Where(broken.at(4), 0.0, values))
        sees = (broken.at(3, 4) & seen).int64().max(-1, keep=True) > 0  # [n, Hkv, tiles, W, 1, 1]
        rows = body.Expand(sees, body.Shape(top)).reshape(*per_tile, -1, 1)
        return (body.Where(rows, float("nan"), clean),)

    finite = ~body.IsNaN(body.ReduceSum(partial - partial, keepdims=0))
    partial = body.when(finite, lambda: (partial,), without_strangers)[0]

    partial = partial.reshape(*per_tile, width, group, depth)
    highest = body.Max(top.max(2, keep=True), step.sinks.at(0, 2, 5))  # [n, Hkv, 1, W, G, 1]
    share = body.Exp(top - highest)
    numerator, denominator = (_in_order(body, part * share) for part in (partial, total))
    denominator = denominator + body.Exp(step.sinks.at(0, 2, 5) - highest)
    out = (numerator / denominator).reshape(n, kv_heads, width, group, depth).permute(0, 2, 1, 3, 4)
    out = body.maybe(lonely, out, lambda: out.slice(0, width - 1, axis=1))
    return body.CastLike(body.Reshape(out, body.Shape(step.queries)), step.queries)


def _with_first_again(rows: Value) -> Value:
    """[n, W, ...] -> [n, W + 1, ...]: each request's first row once more behind its last."""
    return rows.body.Concat(rows, rows.slice(0, 1, axis=1), axis=1)


def _in_order(body: Body, parts: Value) -> Value:
    """Sum over tiles, one after the other: additions must not depend on how many tiles follow."""
    return body.Gather(body.CumSum(parts, 2), [-1], axis=2)


def _one(nonzero: Value) -> Value:
    return nonzero.body.Squeeze(nonzero, [0])
