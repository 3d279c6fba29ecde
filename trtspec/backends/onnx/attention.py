"""SpecAttention and KvCompact as ONNX functions: the ops of `trtspec.ops`, over caches that stay in place.

The new cache is the result of one ScatterND on the old cache. A runtime that gives both the same memory copies nothing.

Attention works on *parts*: the rows of a request or, in a draft tree, a single row, as each has keys of its own. A run
is a sequence of consecutive parts with the same number of rows, which are computed at once. A long prompt is always a
run of its own. A step of generations is a single run. In other steps a `Loop` takes one run after the other, each with
its own number of rows and keys. So a long prompt does not pad the generations.

As in the reference, keys are cut into tiles of fixed size. Each tile is reduced alone, and the tiles are added in
order. So in ONNX Runtime a row has the same bits in any batch, for heads of up to 128. Longer heads are summed in an
order that depends on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto

from trtspec.backends.onnx.builder import Body, Results, Value

TILE = 128
"""Least number of keys in a tile, a whole number of cache blocks. ONNX Runtime's GEMM does not split sums so short."""

LONGEST_IN_RUN = 32
"""Largest number of rows of a request that is computed together with others."""

MOST_IN_RUN = 2**24
"""Most elements of the keys that are gathered at once, but at least one part's. Values take as many."""


@dataclass(frozen=True)
class _Rows:
    """The T packed rows, [T] each. local: number of the row in its request. end: length of its request's sequence.

    place: the row of the sequence, where the token is written. position: the token's; in a draft tree another.
    """

    request: Value
    local: Value
    end: Value
    place: Value
    position: Value


@dataclass(frozen=True)
class _Parts:
    """The N parts. starts, widths, ends: first row, number of rows, number of positions that some row may see, [N].

    tables: [N, C] blocks of its request, whose C columns cover S keys; slots: [N, S] cache slots. One of them is set.
    """

    starts: Value
    widths: Value
    ends: Value
    tables: Value | None = None
    slots: Value | None = None


@dataclass(frozen=True)
class _Step:
    """Values that all rows share. Sizes: N parts, T rows, S keys of the longest part in whole tiles."""

    body: Body
    queries: Value  # [T, Hq, D]
    k_cache: Value  # including the new rows
    v_cache: Value
    scale: Value
    softcap: Value
    sinks: Value  # [Hkv, 1, G] fp32, or one -inf
    seen: Value  # [T, S] bool
    tables: Value | None  # [N, C] int64; its C columns cover S
    slots: Value | None  # [N, S] int64, if there are no tables


def spec_attention(absent: Collection[str] = ()) -> FunctionProto:
    """Return the function SpecAttention. tree_mask and sinks may be absent, or zero-size.

    SpecAttention(q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, tree_base, ancestors;
    scale, window, softcap) -> (out, new_k_cache, new_v_cache). With tree_base and ancestors, which may be absent or
    zero-size together, there is no tree_mask.
    """
    names = (
        "q", "k", "v", "k_cache", "v_cache", "cu_q_lens", "kv_lens", "block_tables", "tree_mask", "sinks", "tree_base",
        "ancestors",
    )  # fmt: skip
    body = Body("SpecAttention", names, ("scale", "window", "softcap"), absent)
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, tree_base, ancestors = body.inputs
    scale, softcap = (body.attribute(name, AttributeProto.FLOAT) for name in ("scale", "softcap"))
    window = body.attribute("window", AttributeProto.INT)

    # First comes what depends only on the step's metadata. ONNX Runtime computes most of it once for all layers.
    bounds, lens, tables = cu_q_lens.int64(), kv_lens.int64(), block_tables.int64()
    starts, stops = bounds.slice(0, -1, axis=0), bounds.slice(1, 2**62, axis=0)  # [B]
    row = body.arange(bounds.slice(-1, 2**62, axis=0))  # [T]
    request = (stops.at(0) <= row.at(1)).int64().sum(1)  # [T]
    local = row - body.Gather(starts, request)
    end = body.Gather(lens, request)
    place = row - body.Gather(stops, request) + end
    rows = _Rows(request, local, end, place, place)
    block_size = k_cache.inner_dim(1)
    slots = _slots(body, tables, request, place, block_size)
    new_k = body.ScatterND(k_cache, slots, k)
    new_v = body.ScatterND(v_cache, slots, v)

    blocks, tile = _tile_size(block_size)
    tiles = _tiles(body.Max(body.ReduceMax(lens, keepdims=0), 1), tile)
    key = body.arange(tiles * tile)  # [S]
    if body.has(ancestors):
        given = body.Size(ancestors) > 0
        chains = functools.partial(body.Expand, -1, body.Concat(row.dim(0), [1], axis=0))
        entries = body.when(given, lambda: (ancestors.int64(),), lambda: (chains(),))[0]
        base = body.when(given, lambda: (tree_base.int64(),), lambda: (lens,))[0]
        rows, parts = _in_trees(body, rows, row, tables, block_size, key, base, entries)
    else:
        present = _one(body.NonZero(stops > starts))  # [N] requests that have rows; N is B except in odd batches
        parts = _Parts(
            starts=body.Gather(starts, present),
            widths=body.Gather(stops - starts, present),
            ends=body.Gather(lens, present),
            tables=_widened(body, body.Gather(tables, present), tiles * blocks),
        )
    widths, ends = parts.widths, parts.ends
    step = _Step(
        body,
        queries=q,
        k_cache=new_k,
        v_cache=new_v,
        scale=scale,
        softcap=softcap,
        sinks=_sinks(body, sinks, k_cache),
        seen=_seen(body, key.at(0), rows, window, tree_mask),
        tables=parts.tables,
        slots=parts.slots,
    )

    before, after = widths.slice(0, -1, axis=0), widths.slice(1, 2**62, axis=0)
    gathered = key.dim(0) * new_k.inner_dim(2) * new_k.inner_dim(3)  # elements of a part's keys
    most = body.Max(body.Div(MOST_IN_RUN, gathered), 1)  # parts of a run
    breaks = ~body.Equal(before, after) | (after > LONGEST_IN_RUN)
    breaks = breaks | body.Equal((body.arange(after.dim(0)) + 1) % most, 0)
    first = _one(body.NonZero(body.Concat([1], breaks.int64(), axis=0)))  # [runs] first request of each
    first = body.Compress(first, first < widths.dim(0), axis=0)  # no runs if there are no rows
    stop = body.Concat(first.slice(1, 2**62, axis=0), widths.dim(0), axis=0)

    def run(i: Value, done: Value) -> Value:
        a, b = (body.Reshape(body.Gather(bound, i), [1]) for bound in (first, stop))
        width = body.Gather(widths, a)
        begin = body.Gather(parts.starts, a)
        bounds = begin, begin + width * (b - a)
        blocks, tile = _tile_size(new_k.inner_dim(1))
        longest = body.ReduceMax(ends.slice(a, b, axis=0), keepdims=1)
        tiles = _tiles(body.Max(longest, 1), tile)
        one = replace(
            step,
            queries=q.slice(*bounds, axis=0),
            seen=step.seen.slice(*bounds, axis=0).slice(0, tiles * tile, axis=1),
            tables=step.tables and step.tables.slice(a, b, axis=0).slice(0, tiles * blocks, axis=1),
            slots=step.slots and step.slots.slice(a, b, axis=0).slice(0, tiles * tile, axis=1),
        )
        return body.Concat(done, _attend(one), axis=0)

    out = body.when(
        body.Equal(first.dim(0), 1),
        lambda: (_attend(step),),
        lambda: (body.loop(body.Reshape(first.dim(0), []), q.slice(0, 0, axis=0), run),),
    )[0]
    return body.function((out, new_k, new_v), ("out", "new_k_cache", "new_v_cache"))


def _in_trees(
    body: Body,
    rows: _Rows,
    row: Value,
    tables: Value,
    block_size: Value,
    key: Value,
    tree_base: Value,
    ancestors: Value,
) -> tuple[_Rows, _Parts]:
    """The rows, and the parts: each row of a tree is one. row: 0 .. T - 1. key: 0 .. S - 1. Others: int64 inputs."""
    entries = (ancestors >= 0).int64().sum(1)  # [T] 0 = not in a tree
    inside = entries > 0
    base = body.Gather(tree_base, rows.request)  # [T]
    position = body.Where(inside, base + entries - 1, rows.place)
    starts = _one(body.NonZero(inside | body.Equal(rows.local, 0)))  # [N]
    stops = body.Concat(starts.slice(1, 2**62, axis=0), row.dim(0), axis=0)
    ends = body.Gather(body.Where(inside, position + 1, rows.end), starts)
    # the rows of a part's keys: those before the tree, then its ancestors, which lie anywhere after that
    index = key.at(0) - body.Gather(base, starts).at(1)  # [N, S]
    last = ancestors.dim(1) - 1
    entry = body.GatherElements(body.Gather(ancestors, starts), body.Min(body.Max(index, 0), last), axis=1)
    own = (index >= 0) & (index <= last) & (entry >= 0)
    places = body.Where(own, body.Gather(base, starts).at(1) + entry, key.at(0))
    owner = body.Expand(body.Gather(rows.request, starts).at(1), body.Shape(places))
    slots = _slots(body, tables, owner, places, block_size)  # [N, S, 2]
    block, offset = (body.Gather(slots, i, axis=2) for i in range(2))
    return (
        replace(rows, position=position),
        _Parts(starts, stops - starts, ends, slots=block * block_size + offset),
    )


def kv_compact() -> FunctionProto:
    """Return the function KvCompact(k_cache, v_cache, block_tables, starts, path) -> (new_k_cache, new_v_cache)."""
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
    """Return (block, offset) of each token, [..., 2]; in scratch block 0 if no column of the table covers the token."""
    column = body.Div(position, block_size)
    last = tables.dim(1) - 1
    inside = (position >= 0) & (column <= last)
    cell = body.Concat(request.at(-1), body.Min(body.Max(column, 0), last).at(-1), axis=-1)
    block = body.Where(inside, body.GatherND(tables, cell), 0)
    return body.Concat(block.at(-1), (position % block_size).at(-1), axis=-1)


def _tile_size(block_size: Value) -> tuple[Value, Value]:
    """Number of blocks and keys in a tile. Each branch computes it anew, as a constant of its own (`Body.constant`)."""
    blocks = (block_size + (TILE - 1)) // block_size
    return blocks, blocks * block_size


def _tiles(longest: Value, tile: Value) -> Value:
    return (longest + tile - 1) // tile


def _widened(body: Body, tables: Value, columns: Value) -> Value:
    """Return tables with exactly `columns` columns. Added columns are scratch; no row attends to those cut off."""
    missing = body.Max(columns - tables.dim(1), 0)
    scratch = body.Expand(0, body.Concat(tables.dim(0), missing, axis=0))
    return body.Concat(tables, scratch, axis=1).slice(0, columns, axis=1)


def _seen(body: Body, key: Value, rows: _Rows, window: Value, tree_mask: Value) -> Value:
    """Return which keys each row attends to, [T, S] bool. `key` is [1, S]."""
    position, local, end = rows.position.at(1), rows.local.at(1), rows.end.at(1)

    def tree() -> Value:
        # Bit j of a row's mask is the request's new row j. All tokens before the new rows are committed and visible.
        index = key - (position - local)  # [T, S] index of each key among the new rows, negative if committed
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
    """Return bit `index` of int64 words, as a boolean."""
    shifted = body.BitShift(words.to(TensorProto.UINT64), index.to(TensorProto.UINT64), direction="RIGHT")
    return body.BitwiseAnd(shifted.int64(), 1) > 0


def _sinks(body: Body, sinks: Value, k_cache: Value) -> Value:
    none = body.constant(np.full((1, 1, 1), -np.inf, np.float32))
    if not body.has(sinks):
        return none
    return body.maybe(body.Size(sinks) > 0, none, lambda: sinks.float32().reshape(k_cache.inner_dim(2), 1, -1))


def _attend(step: _Step) -> Value:
    """Return the attention of n requests with W rows each, [n * W, Hq, D].

    G = Hq / Hkv query heads share a key head. The W * G query heads of a request are the rows of one matrix.
    """
    body = step.body
    block_size, kv_heads, depth = (step.k_cache.inner_dim(axis) for axis in (1, 2, 3))
    _, tile = _tile_size(block_size)
    where = step.slots if step.tables is None else step.tables
    assert where is not None
    n, tiles = where.dim(0), step.seen.dim(1) // tile
    group = step.queries.inner_dim(1) // kv_heads
    queries = (step.queries.float32() * step.scale).reshape(n, -1, kv_heads, group, depth)
    seen = step.seen.reshape(n, -1, tiles, tile)
    # MatMul sums a single column in another order than a column among others, so the first row is added once more.
    lonely = body.Equal(group, 1)
    queries, seen = (body.maybe(lonely, x, functools.partial(_with_first_again, x)) for x in (queries, seen))
    width = queries.dim(1)
    per_tile = (n, kv_heads, tiles)
    queries = queries.permute(0, 2, 4, 1, 3).reshape(n, kv_heads, 1, depth, -1)
    seen = seen.permute(0, 2, 1, 3).at(1, 4)  # [n, 1, tiles, W, 1, tile]
    caches = [step.k_cache, step.v_cache]
    if step.tables is None:
        caches = [cache.reshape(-1, kv_heads, depth) for cache in caches]
    keys, values = (
        body.Gather(cache, where, axis=0).reshape(n, tiles, tile, kv_heads, depth).permute(0, 3, 1, 2, 4).float32()
        for cache in caches
    )  # [n, Hkv, tiles, tile, D]

    scores = body.MatMul(keys, queries)  # [n, Hkv, tiles, tile, W * G]
    scores = body.maybe(step.softcap > 0.0, scores, lambda: body.Tanh(scores / step.softcap) * step.softcap)
    scores = scores.permute(0, 1, 2, 4, 3).reshape(*per_tile, width, group, tile)
    scores = body.Where(seen, scores, float("-inf"))
    top = body.Max(scores.max(-1, keep=True), -1e30)  # [n, Hkv, tiles, W, G, 1], finite even if no key is visible
    weights = body.Exp(scores - top)
    total = weights.sum(-1, keep=True)
    weights = weights.reshape(*per_tile, -1, tile)
    partial = body.MatMul(weights, values)  # [n, Hkv, tiles, W * G, D]

    def without_strangers() -> Results:
        # 0 * NaN is NaN. Values past a request's end, or of a later row, must not reach this row.
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
    """Append each request's first row after its last: [n, W, ...] -> [n, W + 1, ...]."""
    return rows.body.Concat(rows, rows.slice(0, 1, axis=1), axis=1)


def _in_order(body: Body, parts: Value) -> Value:
    """Sum tiles one after the other, because the order of additions must not depend on the number of tiles."""
    return body.Gather(body.CumSum(parts, 2), [-1], axis=2)


def _one(nonzero: Value) -> Value:
    return nonzero.body.Squeeze(nonzero, [0])
