"""The steps of process_logits, which logits.py combines to kernels. Each works on the tokens begin <= v < end of a row.

top-k keeps the logits that are not below the k-th largest. top-p keeps those that are not below the smallest that it
keeps. Both limits are the lowest number such that more than a bound lies at or below it. The bound is a number of
tokens for top-k, and their probability for top-p.

The search for a limit runs over unsigned integers in the order of the floats. Each look at the row fixes four bits. A
look adds up what lies at or below the end of each sixteenth of the interval that is left. Eight looks leave one number.

Probabilities are added as integers, which makes sums exact: they depend neither on the order nor on which program adds
what.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOOKS = tl.constexpr(8)  # of 4 bits each
DEPTH = tl.constexpr(4)  # tokens that a lane tallies at a time
NO_LIMIT = tl.constexpr(float("-inf"))  # value of `least`, the least logit that stays


@triton.jit
def ordinal(x):
    """uint32 in the order of the floats: NaN is above all others, and -0 next to 0."""
    bits = x.to(tl.int32, bitcast=True)
    flips = (bits >> 31) | -2147483648  # all bits of a negative number, the sign bit of any other
    return tl.where(x != x, -1, bits ^ flips).to(tl.uint32, bitcast=True)


@triton.jit
def number(ordinal):
    bits = ordinal.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def prepare(
    r, begin, end, logits, positions, ban_ids, ban_until, allow_mask, temperatures, V, M,
    num_bans, num_masks, num_temperatures, out, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write logits without banned tokens and tokens that are not allowed, divided by the temperature."""
    row = r.to(tl.int64) * V
    temperature = 0.0
    if r < num_temperatures:
        temperature = tl.load(temperatures + r)
    divided = temperature > 0
    for start in range(begin, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row + v, mask=v < end, other=0.0)
        if r < num_masks:
            word = tl.load(allow_mask + r.to(tl.int64) * tl.cdiv(V, 32) + v // 32, mask=v < end, other=0)
            x = tl.where((word >> (v % 32)) & 1 == 0, float("-inf"), x)
        if divided:
            x = tl.div_rn(x, temperature)
        tl.store(out + row + v, x, mask=v < end)
    tl.debug_barrier()  # other threads write and read these logits next
    if r < num_bans:
        position = tl.load(positions + r)
        for start in range(0, M, 32):
            m = start + tl.arange(0, 32)
            place = r.to(tl.int64) * M + m
            token = tl.load(ban_ids + place, mask=m < M, other=-1)
            until = tl.load(ban_until + place, mask=m < M, other=0)
            banned = (token >= begin) & (token < end) & (position < until)
            # The reference bans before it divides, which gives NaN if the temperature is infinite.
            removed = tl.where(temperature == float("inf"), float("nan"), float("-inf"))
            tl.store(out + row + token, removed, mask=banned)
        tl.debug_barrier()


@triton.jit
def highest(row, begin, end, BLOCK: tl.constexpr):
    """The highest ordinal, as int64."""
    top = tl.full((), 0, tl.int64)
    for start in range(begin, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < end, other=float("-inf"))
        top = tl.maximum(top, tl.max(ordinal(x).to(tl.int64), axis=0))
    return top


@triton.jit
def settings(r, top_ks, top_ps, min_ps, num_top_ks, num_top_ps, num_min_ps, V):
    """(k, p, min_p) of a row. Values that are off are 0, 1, 0."""
    k = 0
    p = 1.0
    min_p = 0.0
    if r < num_top_ks:
        k = tl.load(top_ks + r)
        k = tl.where((k > 0) & (k < V), k, 0)
    if r < num_top_ps:
        p = tl.load(top_ps + r)
        p = tl.where(p < 1, tl.maximum(p, 0.0), 1.0)
    if r < num_min_ps:
        min_p = tl.load(min_ps + r)
        min_p = tl.where(min_p > 0, min_p, 0.0)
    return k, p, min_p


@triton.jit
def tally(row, begin, end, prefix, look, least, top, MASS: tl.constexpr, LANES: tl.constexpr):
    """[16] int64: the amount in the interval that starts at `prefix`, at or below the end of each of its sixteenths.

    The amount is a number of tokens or, if MASS, their probability relative to that of the likeliest, in multiples of
    2^-40. The probability of up to 2^22 tokens fits. Tokens below `least` do not count then.
    """
    sums = tl.zeros((16, LANES), tl.int64 if MASS else tl.int32)
    sixteenths = tl.arange(0, 16)[:, None, None]
    shift = 28 - 4 * look
    v = begin + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]  # [DEPTH, LANES]
    following = tl.load(row + v, mask=v < end, other=float("-inf"))
    for _ in range(begin, end, DEPTH * LANES):
        x = following
        inside = v < end
        v += DEPTH * LANES
        following = tl.load(row + v, mask=v < end, other=float("-inf"))  # in flight while x is tallied
        digit = (ordinal(x) - prefix) >> shift  # wraps: tokens below the interval get more than any digit
        inside &= digit < 16
        if MASS:
            inside &= x >= least
        if tl.max(tl.max(inside.to(tl.int32), axis=1), axis=0) > 0:  # after some looks mostly none is
            amount = inside.to(tl.int32)
            if MASS:
                amount = tl.where(inside, tl.exp(x - top) * 1099511627776.0, 0.0).to(tl.int64)
            lies = digit.to(tl.int32)[None, :, :] <= sixteenths  # [16, DEPTH, LANES]
            sums += tl.sum(tl.where(lies, amount[None, :, :], 0), axis=1)
    return tl.sum(sums, axis=1).to(tl.int64)


@triton.jit
def descend(tallies, prefix, rest, look, p, MASS: tl.constexpr):
    """(prefix, rest) of the sixteenth in which the amount exceeds `rest`; the last one if it never does.

    prefix: start of an interval. rest: part of the bound that lies in the interval. top-p's bound follows from the
    first look.
    """
    if MASS:
        bound = ((1.0 - p).to(tl.float64) * tl.max(tallies, axis=0).to(tl.float64)).to(tl.int64)
        rest = tl.where(look == 0, bound, rest)
    passed = tallies <= rest
    digit = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), 15)
    rest -= tl.max(tl.where(passed, tallies, 0), axis=0)
    return prefix + (digit << (28 - 4 * look)).to(tl.uint32), rest


@triton.jit
def cut(row, begin, end, least, top, min_p, BLOCK: tl.constexpr):
    """Remove tokens below `least` and tokens less likely than min_p times the likeliest."""
    for start in range(begin, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < end, other=0.0)
        gone = (x < least) | (tl.exp(x - top) < min_p)
        tl.store(row + v, tl.where(gone, float("-inf"), x), mask=v < end)
