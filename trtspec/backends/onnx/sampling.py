"""ProcessLogits, SpecSample and SpecAccept as ONNX functions: the ops of `trtspec.ops`.

Each part is in an `If` and is skipped if no row requests it. A zero-size input means that no row requests its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import numpy as np
from onnx import FunctionProto, TensorProto

from trtspec.backends.onnx.builder import Body, Value
from trtspec.ops.sample import LOG_COEFFICIENTS, M0, M1, W0, W1

INF = float("inf")
NO_TOKEN = 2**63 - 1
"""Token of a row that has no best token; the host refuses it."""
Operation = tuple[Value, Callable[[], Value], Callable[[Value], Value]]


def spec_accept() -> FunctionProto:
    """Return SpecAccept(sampled, draft_tokens, draft_lens, forced_accept, emits) -> (tokens, num_tokens)."""
    body = Body("SpecAccept", ("sampled", "draft_tokens", "draft_lens", "forced_accept", "emits"))
    sampled, drafts, draft_lens, forced_accept, emits = body.inputs
    lens, forced = draft_lens.int64(), forced_accept.int64()
    offered = body.arange(drafts.dim(1)) < lens.at(1)  # [B, K]
    agree = body.Equal(drafts, sampled.slice(0, drafts.dim(1), axis=1)) & offered
    misses = body.CumSum((~agree).int64(), 1)
    agreed = body.Equal(misses, 0).int64().sum(1)  # length of the leading run of agreement
    accepted = body.Where(forced >= 0, body.Min(forced, lens), agreed)
    num_tokens = body.Where(emits, accepted + 1, 0)
    kept = body.arange(sampled.dim(1)) < num_tokens.at(1)
    return body.function((body.Where(kept, sampled, -1), num_tokens), ("tokens", "num_tokens"))


def process_logits(absent: Collection[str] = ()) -> FunctionProto:
    """Return ProcessLogits(logits, positions, history, ..., min_ps) -> logits, with the inputs of the op.

    Any group of inputs may be absent, or zero-size. Top-k and the filters after it do not change rows with a NaN.
    """
    names = (
        "logits", "positions", "history", "prompt_lens", "penalties", "bias_ids", "bias_values", "ban_ids",
        "ban_until", "allow_mask", "temperatures", "top_ks", "top_ps", "min_ps",
    )  # fmt: skip
    body = Body("ProcessLogits", names, absent=absent)
    (
        out, positions, history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask,
        temperatures, top_ks, top_ps, min_ps,
    ) = body.inputs  # fmt: skip
    V = out.dim(1)
    # For each part: an input that it needs, whether a row requests it, and the function that applies it.
    constraints: list[Operation] = [
        (bias_ids, lambda: (bias_ids.int64() >= 0).any(), lambda x: _bias(x, bias_ids, bias_values)),
        (penalties, lambda: body.Size(penalties) > 0, lambda x: _penalise(x, history, prompt_lens, penalties)),
        (ban_ids, lambda: (ban_ids.int64() >= 0).any(), lambda x: _ban(x, ban_ids, ban_until, positions)),
        (allow_mask, lambda: body.Size(allow_mask) > 0, lambda x: _allow(x, allow_mask)),
    ]
    filters: list[Operation] = [
        (temperatures, lambda: (temperatures > 0.0).any(), lambda x: warm(x, temperatures)),
        (top_ks, lambda: in_use(top_ks, V).any(), lambda x: _top_k(x, top_ks)),
        (top_ps, lambda: (top_ps < 1.0).any(), lambda x: _top_p(x, top_ps)),
        (min_ps, lambda: (min_ps > 0.0).any(), lambda x: min_p(x, min_ps)),
    ]
    asked_constraints = [(asked(), change) for needed, asked, change in constraints if body.has(needed)]

    def edited(x: Value) -> Value:
        for asked, change in asked_constraints:
            x = body.maybe(asked, x, functools.partial(change, x))
        return x

    if (
        len(asked_constraints) > 1
    ):  # a skipped part copies the logits; with one `If` around all parts, they are copied once
        any_constraint = functools.reduce(Value.__or__, (asked for asked, _ in asked_constraints))
        out = body.maybe(any_constraint, out, functools.partial(edited, out))
    else:
        out = edited(out)
    for needed, asked, change in filters:
        if body.has(needed):
            out = body.maybe(asked(), out, functools.partial(change, out))
    return body.function((body.Identity(out),), ("processed",))


def _penalise(logits: Value, history: Value, prompt_lens: Value, penalties: Value) -> Value:
    body, ids = logits.body, history.int64()
    repetition, presence, frequency = (penalties.slice(i, i + 1, axis=1) for i in range(3))  # [R, 1]
    real = ids >= 0
    is_output = body.arange(ids.dim(1)) >= prompt_lens.int64().at(1)
    zeros = body.Expand(0.0, body.Shape(logits))

    def count(which: Value) -> Value:
        return body.ScatterElements(zeros, body.Max(ids, 0), which.float32(), axis=1, reduction="add")

    outputs = count(real & is_output)
    scaled = body.Where(logits > 0.0, logits / repetition, logits * repetition)
    out = body.Where(count(real) > 0.0, scaled, logits)
    return out - outputs * frequency - (outputs > 0.0).float32() * presence


def _bias(logits: Value, bias_ids: Value, bias_values: Value) -> Value:
    body, ids = logits.body, bias_ids.int64()
    values = body.Where(ids < 0, 0.0, bias_values)
    return body.ScatterElements(logits, body.Max(ids, 0), values, axis=1, reduction="add")


def _ban(logits: Value, ban_ids: Value, ban_until: Value, positions: Value) -> Value:
    body, ids = logits.body, ban_ids.int64()
    active = (ids >= 0) & (positions.at(1) < ban_until)
    zeros = body.Expand(0, body.Shape(logits))
    banned = body.ScatterElements(zeros, body.Max(ids, 0), active.int64(), axis=1, reduction="max")
    return body.Where(banned > 0, -INF, logits)


def _allow(logits: Value, allow_mask: Value) -> Value:
    body, ids = logits.body, logits.body.arange(logits.dim(1))
    words = body.Gather(allow_mask.int64(), ids // 32, axis=1).to(TensorProto.UINT64)
    bits = body.BitShift(words, (ids % 32).to(TensorProto.UINT64), direction="RIGHT")
    return body.Where(body.BitwiseAnd(bits.int64(), 1) > 0, logits, -INF)


def warm(logits: Value, temperatures: Value) -> Value:
    temperature = temperatures.at(1)
    return logits.body.Where(temperature > 0.0, logits / temperature, logits)


def in_use(top_ks: Value, V: Value) -> Value:
    ks = top_ks.int64()
    return (ks > 0) & (ks < V)


def _top_k(logits: Value, top_ks: Value) -> Value:
    body = logits.body
    used = in_use(top_ks, logits.dim(1))  # [R]
    k = body.Where(used, top_ks.int64(), 1)
    top, _ = body.op("TopK", _comparable(logits), body.ReduceMax(k, keepdims=1), outputs=2, axis=1)
    kth = body.GatherElements(top, (k - 1).at(1), axis=1)  # [R, 1]
    kth = body.Where(used.at(1) & ~has_nan(logits), kth, -INF)
    return body.Where(logits < kth, -INF, logits)  # all ties with the k-th stay


def _top_p(logits: Value, top_ps: Value) -> Value:
    body, p = logits.body, top_ps.at(1)
    left = (logits > -INF).int64().sum(1).max(0, keep=True)  # logits of -inf have no mass and need no sort
    descending, _ = body.op("TopK", _comparable(logits), body.Max(left, 1), outputs=2, axis=1)
    ascending = body.Slice(descending, [-1], [-(2**62)], [1], [-1])  # [R, n]
    # The sum goes from the least likely token on, in doubles as in torch. Logits of -inf before it add nothing.
    sums = body.CumSum(body.Exp(ascending - ascending.slice(-1, 2**62, axis=1)).to(TensorProto.DOUBLE), 1)
    mass = (sums / sums.slice(-1, 2**62, axis=1)).float32()
    dropped = ((mass <= (1.0 - p)) & (p < 1.0)).int64().sum(1)
    dropped = body.Min(dropped, ascending.dim(1) - 1).at(1)  # the most likely token stays
    smallest_kept = body.Where(has_nan(logits), -INF, body.GatherElements(ascending, dropped, axis=1))
    return body.Where(logits < smallest_kept, -INF, logits)


def min_p(logits: Value, min_ps: Value) -> Value:
    body, floor = logits.body, min_ps.at(1)
    relative = body.Exp(logits - logits.max(1, keep=True))  # p / p_max
    return body.Where((relative < floor) & (floor > 0.0) & ~has_nan(logits), -INF, logits)


def has_nan(logits: Value) -> Value:
    """Return whether each row has a NaN, [R, 1]. ONNX Runtime's ReduceMax does not show it."""
    return logits.body.IsNaN(logits).to(TensorProto.INT32).max(1, keep=True).int64() > 0


def _comparable(logits: Value) -> Value:
    """Replace NaN by -inf, because NaN cannot be sorted."""
    return logits.body.Where(logits.body.IsNaN(logits), -INF, logits)


def spec_sample(absent: Collection[str] = ()) -> FunctionProto:
    """Return SpecSample(logits, greedy, seeds, positions, vocab_ids) -> tokens [R] int64, bit for bit those of the op.

    seeds and vocab_ids may be absent, or zero-size.
    """
    body = Body("SpecSample", ("logits", "greedy", "seeds", "positions", "vocab_ids"), absent=absent)
    logits, greedy, seeds, positions, vocab_ids = body.inputs
    draws = ~greedy  # [R]
    noisy = logits
    if body.has(seeds):
        asked = draws.any() & (body.Size(seeds) > 0)
        noisy = body.maybe(asked, logits, lambda: _noisy(logits, draws.at(1), seeds, positions, vocab_ids))
    top = noisy.max(1, keep=True)
    exists = (top > -INF) & ~has_nan(noisy)  # [R, 1]
    # Ties go to the lowest target id: ArgMax returns the first of equal values.
    best = body.ArgMax(noisy, axis=1, keepdims=0)
    if body.has(vocab_ids):

        def lowest_target_id() -> Value:
            return body.ReduceMin(body.Where(body.Equal(noisy, top), vocab_ids, NO_TOKEN), [1], keepdims=0)

        best = body.maybe(body.Size(vocab_ids) > 0, best, lowest_target_id)
    tokens = body.Where(body.Squeeze(exists, [1]), best, NO_TOKEN)
    return body.function((tokens,), ("tokens",))


def _noisy(logits: Value, draws: Value, seeds: Value, positions: Value, vocab_ids: Value) -> Value:
    """Add Gumbel noise to logits [R, V] of rows that draw. If filters leave few candidates, only these get noise."""
    body = logits.body
    candidate = (logits > -INF) & draws

    def all_at_once() -> Value:
        noise = gumbel(dense_words(seeds.at(1), positions.at(1), logits.dim(1)))
        return body.Where(draws, logits + noise, logits)

    def one_by_one() -> Value:
        cells = body.NonZero(candidate).permute(1, 0)  # [n, 2]
        row, column = (body.Squeeze(cells.slice(i, i + 1, axis=1), [1]) for i in range(2))
        ids = column
        if body.has(vocab_ids):
            ids = body.maybe(body.Size(vocab_ids) > 0, column, lambda: body.Gather(vocab_ids, column))
        noise = gumbel(words_of(body.Gather(seeds, row), body.Gather(positions, row), ids))
        return body.ScatterND(logits, cells, body.GatherND(logits, cells) + noise)

    # One counter yields the noise of four ids at once, but only if the ids are not picked one by one.
    dense = body.ReduceSum(candidate.int64(), keepdims=0) * 4 > body.Size(logits)
    if body.has(vocab_ids):
        dense = dense & body.Equal(body.Size(vocab_ids), 0)
    return body.when(dense, lambda: (all_at_once(),), lambda: (one_by_one(),))[0]


def words_of(seeds: Value, positions: Value, ids: Value) -> Value:
    """Return the word x of the noise G(seed, t, v) for n triples, or for triples in any other shape."""
    body = seeds.body
    words = _philox(seeds, _shift_right(ids, 2), positions)
    lane = body.BitwiseAnd(ids, 3)
    word = words[3]
    for i in range(3):
        word = body.Where(body.Equal(lane, i), words[i], word)
    return word


def dense_words(seeds: Value, positions: Value, V: Value) -> Value:
    """Return the words of ids 0 .. V - 1, [R, V]; seeds and positions are [R, 1]."""
    body = seeds.body
    words = _philox(seeds, body.arange((V + 3) // 4).at(0), positions)
    word = body.Concat(*(one.at(2) for one in words), axis=2).reshape(positions.dim(0), -1)
    return word.slice(0, V, axis=1)


def _philox(seeds: Value, quads: Value, positions: Value) -> tuple[Value, Value, Value, Value]:
    """Philox4x32-10 of counters (quad, low and high half of the position, 0): four words, int64 in [0, 2^32)."""
    body = seeds.body
    low, high = _half(seeds), _shift_right(seeds, 32)
    c0, c1, c2 = quads, _half(positions), _shift_right(positions, 32)
    c3: Value | int = 0
    for r in range(10):
        if r:
            low, high = _half(low + W0), _half(high + W1)
        product0, product1 = c0 * M0, c2 * M1  # int64 wraps, so all 64 bits are right
        c0 = body.BitwiseXor(body.BitwiseXor(_shift_right(product1, 32), c1), low)
        c2 = body.BitwiseXor(body.BitwiseXor(_shift_right(product0, 32), c3), high)
        c1, c3 = _half(product1), _half(product0)
    assert isinstance(c3, Value)
    return c0, c1, c2, c3


def _half(words: Value) -> Value:
    return words.body.BitwiseAnd(words, 0xFFFFFFFF)


def _shift_right(words: Value, bits: int) -> Value:
    """Shift int64 words right by `bits`, as unsigned numbers."""
    body, by = words.body, words.body.constant(np.array(bits, np.uint64))
    return body.BitShift(words.to(TensorProto.UINT64), by, direction="RIGHT").int64()


def gumbel(words: Value) -> Value:
    """Gumbel noise -log(-log(u)) with u = ((x >> 9) + 0.5) * 2^-23, for the words x."""
    return -_log(-_log(uniform(words)))


def uniform(words: Value) -> Value:
    """Return u = ((x >> 9) + 0.5) * 2^-23 for the words x."""
    return (_shift_right(words, 9).float32() + 0.5) * 2.0**-23


def _log(x: Value) -> Value:
    """Logarithm for 2^-31 < x < 32, with the same fp32 operations in the same order as `_log` of ops/sample.py.

    Before opset 26, ONNX cannot access the bits of a float. So the exponent is found by exact multiplications with
    powers of two, which leave a mantissa in [0.5, 1).
    """
    body = x.body
    mantissa = x * 2.0**-5
    exponent: Value = body.value(5.0)
    for step in (16, 8, 4, 2, 1):
        below = mantissa < 2.0**-step
        mantissa = mantissa * body.Where(below, 2.0**step, 1.0)
        exponent = exponent - body.Where(below, float(step), 0.0)
    small = mantissa < 0.70710678
    exponent = exponent - small.float32()
    f = body.Where(small, mantissa + mantissa, mantissa) - 1.0
    square = f * f
    poly = f * LOG_COEFFICIENTS[0] + LOG_COEFFICIENTS[1]
    for coefficient in LOG_COEFFICIENTS[2:]:
        poly = poly * f + coefficient
    y = poly * f * square + exponent * -2.12194440e-4 - square * 0.5
    return (f + y) + exponent * 0.693359375
