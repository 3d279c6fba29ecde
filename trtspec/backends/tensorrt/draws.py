"""ProcessLogits and SpecSample as ONNX functions that TensorRT's own layers can compute, for networks without plugins.

They compute what the functions of backends/onnx/sampling.py do, with four changes:

- TensorRT sorts at most 3,840 numbers. So thresholds of top-k and top-p are searched for, PASSES times among WAYS
  numbers at once. Logits count as equal if they differ by less than the range of a row / WAYS^PASSES. Masses are summed
  in fp32.
- Logarithms are TensorRT's. So noise differs from that of other backends by rounding errors. (The builder's time
  explodes with the terms of a polynomial in front of a reduction.)
- No part is skipped: noise and filters are computed for every row, and rows that ask for none keep what they had.
- Constraints are not known, except ban_ids.

There are no loops and no branches, as TensorRT-RTX 1.7 ends with a segmentation fault for some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from onnx import FunctionProto

from trtspec.backends.onnx.builder import Body, Value
from trtspec.backends.onnx.sampling import (
    INF,
    NO_TOKEN,
    dense_words,
    has_nan,
    in_use,
    min_p,
    uniform,
    warm,
    words_of,
)

WAYS, PASSES = 64, 5
"""Thresholds that are tried at once, and how often."""


def process_logits(absent: Collection[str] = ()) -> FunctionProto:
    """Return ProcessLogits without constraints: bans, temperatures, top-k, top-p and min-p, in this order."""
    names = ("logits", "positions", "ban_ids", "ban_until", "temperatures", "top_ks", "top_ps", "min_ps")
    body = Body("ProcessLogits", names, absent=absent)
    out, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps = body.inputs
    if body.has(ban_ids):
        out = _ban(out, ban_ids, ban_until, positions)
    if body.has(temperatures):
        out = warm(out, temperatures)
    if body.has(top_ks):
        out = _top_k(out, top_ks)
    if body.has(top_ps):
        out = _top_p(out, top_ps)
    if body.has(min_ps):
        out = min_p(out, min_ps)
    return body.function((body.Identity(out),), ("processed",))


def _ban(logits: Value, ban_ids: Value, ban_until: Value, positions: Value) -> Value:
    """Set banned logits to -inf. Bans that do not hold mark a column after the last one."""
    body, ids, V = logits.body, ban_ids.int64(), logits.dim(1)
    active = (ids >= 0) & (positions.at(1) < ban_until)
    zeros = body.Expand(0, body.Concat(logits.dim(0), V + 1, axis=0))
    marks = body.Expand(1, body.Shape(ids))
    banned = body.ScatterElements(zeros, body.Where(active, ids, V), marks, axis=1)
    return body.Where(banned.slice(0, V, axis=1) > 0, -INF, logits)


def _top_k(logits: Value, top_ks: Value) -> Value:
    """Keep the top_ks highest logits. Ties with the last one stay."""
    body, k = logits.body, top_ks.float32().at(1)

    def enough(thresholds: Value) -> Value:
        return body.Where(logits.at(2) < thresholds, 0.0, 1.0).sum(1) >= k

    kept = in_use(top_ks, logits.dim(1)).at(1) & ~has_nan(logits)
    return body.Where(logits < body.Where(kept, _highest(logits, enough), -INF), -INF, logits)


def _top_p(logits: Value, top_ps: Value) -> Value:
    """Keep the fewest of the most likely tokens that have the mass top_ps. Ties with the last one stay."""
    body, p = logits.body, top_ps.at(1)
    mass = body.Exp(logits - logits.max(1, keep=True))
    spare = mass.sum(1, keep=True) * (1.0 - p)

    def spare_enough(thresholds: Value) -> Value:
        return body.Where(logits.at(2) < thresholds, mass.at(2), 0.0).sum(1) <= spare

    kept = (p < 1.0) & ~has_nan(logits)
    return body.Where(logits < body.Where(kept, _highest(logits, spare_enough), -INF), -INF, logits)


def _highest(logits: Value, hold: Callable[[Value], Value]) -> Value:
    """Return the highest threshold [R, 1] that holds, between the least and the largest logit of a row.

    hold: a function (thresholds [R, 1, WAYS]) -> bool [R, WAYS]. It is false above any threshold for which it is false.
    """
    body, most = logits.body, logits.max(1, keep=True)
    low = body.ReduceMin(body.Where(logits > -INF, logits, most), [1], keepdims=1)
    width = most + 1.0 - low
    parts = body.constant((np.arange(WAYS) / WAYS).astype(np.float32)).at(0)  # [1, WAYS]
    for _ in range(PASSES):
        held = hold((low + width * parts).at(1)).float32().sum(1, keep=True)  # the first threshold always holds
        low = low + width * (body.Max(held - 1.0, 0.0) * (1.0 / WAYS))
        width = width * (1.0 / WAYS)
    return body.Min(low, most)


def spec_sample(absent: Collection[str] = ()) -> FunctionProto:
    """Return SpecSample(logits, greedy, seeds, positions, vocab_ids) -> tokens [R] int64.

    seeds and vocab_ids may be absent.
    """
    body = Body("SpecSample", ("logits", "greedy", "seeds", "positions", "vocab_ids"), absent=absent)
    logits, greedy, seeds, positions, vocab_ids = body.inputs
    ids = vocab_ids.at(0) if body.has(vocab_ids) else body.arange(logits.dim(1)).at(0)  # [1, V]
    noisy = logits
    if body.has(seeds):
        if body.has(vocab_ids):
            words = words_of(seeds.at(1), positions.at(1), ids)
        else:
            words = dense_words(seeds.at(1), positions.at(1), logits.dim(1))
        noise = -body.Log(-body.Log(uniform(words)))
        noisy = body.Where(greedy.at(1), logits, logits + noise)
    top = noisy.max(1, keep=True)
    exists = (top > -INF) & ~has_nan(noisy)
    best = body.ReduceMin(body.Where(body.Equal(noisy, top), ids, NO_TOKEN), [1], keepdims=1)
    return body.function((body.Squeeze(body.Where(exists, best, NO_TOKEN), [1]),), ("tokens",))
