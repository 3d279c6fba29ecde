"""process_logits, of the groups that TensorRT's plugin takes: one program a row, thresholds in place of sorting.

top-k keeps what is not below the k-th largest logit, top-p what is not below the smallest one that it keeps. Both are
the lowest value with more than a bound at or below it, of tokens in the one case, of their probability in the other: a
search over the integers that order floats as the floats themselves, which in at most 32 looks at the row finds it
exactly.

What stays has the reference's bits: bans and temperature are the reference's operations, and filters remove or keep.
top-k removes what the reference removes. top-p and min-p may decide otherwise about a token within rounding errors of
the edge: exp is the GPU's, and probabilities are added lane by lane, where the reference adds them as sorted. That
order depends on nothing but V, so a row's result is its own.

No metadata, however wrong, makes it read or write past a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tokens at a time
NUM_WARPS = 16


@triton.jit
def _key(x):
    """int32 that orders as the floats: NaN above all, and -0 next to 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, least, top):
    """What a token's probability is in proportion to; 0 for what is below `least`."""
    return tl.where(x >= least, tl.exp(x - top), 0.0)


@triton.jit
def _lowest(row, V, lo, hi, bound, least, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key in lo < key <= hi with more than `bound` at or below it: tokens, or, if MASS, their weights.

    lo and hi: int64, so that their sum fits; not more than `bound` is at lo or below, and hi is a token's key.
    """
    while hi - lo > 1:
        middle = ((lo + hi) >> 1).to(tl.int32)
        sums = tl.zeros((BLOCK,), tl.float32 if MASS else tl.int32)
        under = tl.full((BLOCK,), -2147483648, tl.int32)
        over = tl.full((BLOCK,), 2147483647, tl.int32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row + v, mask=v < V, other=float("nan"))  # which is never below the highest key
            key = _key(x)
            low = key <= middle
            if MASS:
                sums += tl.where(low, _weight(x, least, top), 0.0)
            else:
                sums += low.to(tl.int32)
            under = tl.maximum(under, tl.where(low, key, -2147483648))
            over = tl.minimum(over, tl.where(low, 2147483647, key))
        # Where no token lies between, the answer is not either.
        if tl.sum(sums, axis=0) > bound:
            hi = tl.max(under, axis=0).to(tl.int64)
        else:
            lo = tl.min(over, axis=0).to(tl.int64) - 1
    return hi.to(tl.int32)


@triton.jit
def process_logits_kernel(
    logits,  # [R, V] fp32
    positions,  # [R] int64
    ban_ids,  # [R, M] int32
    ban_until,  # [R, M] int64
    temperatures,  # [R] fp32
    top_ks,  # [R] int32
    top_ps,  # [R] fp32
    min_ps,  # [R] fp32
    V,
    M,
    num_bans,  # rows of ban_ids; as those below R, or 0 where the group is not used and its pointer may be anything
    num_temperatures,
    num_top_ks,
    num_top_ps,
    num_min_ps,
    out,  # [R, V] fp32
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    begin = r.to(tl.int64) * V
    row = out + begin
    temperature = 0.0
    if r < num_temperatures:
        temperature = tl.load(temperatures + r)
    divided = temperature > 0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + begin + v, mask=v < V, other=0.0)
        if divided:
            x = tl.div_rn(x, temperature)
        tl.store(row + v, x, mask=v < V)
    tl.debug_barrier()  # what comes next is written and read by other threads

    if r < num_bans:
        position = tl.load(positions + r)
        for start in range(0, M, 32):
            m = start + tl.arange(0, 32)
            place = r.to(tl.int64) * M + m
            token = tl.load(ban_ids + place, mask=m < M, other=-1)
            until = tl.load(ban_until + place, mask=m < M, other=0)
            banned = (token >= 0) & (token < V) & (position < until)
            # The reference bans before it divides, which is NaN where the temperature is infinite.
            removed = tl.where(temperature == float("inf"), float("nan"), float("-inf"))
            tl.store(row + token, removed, mask=banned)
        tl.debug_barrier()

    k = 0
    p = 1.0
    min_p = 0.0
    if r < num_top_ks:
        k = tl.load(top_ks + r)
    if r < num_top_ps:
        p = tl.load(top_ps + r)
    if r < num_min_ps:
        min_p = tl.load(min_ps + r)
    few = (k > 0) & (k < V)
    if few | (p < 1) | (min_p > 0):
        highest = tl.full((BLOCK,), -2147483648, tl.int32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row + v, mask=v < V, other=float("-inf"))
            highest = tl.maximum(highest, _key(x))
        top_key = tl.max(highest, axis=0)
        top = _float(top_key)
        least = float("-inf")  # what is below goes
        if few:
            lo = tl.full((), -2147483648, tl.int64)
            least = _float(_lowest(row, V, lo, top_key.to(tl.int64), V - k, 0.0, 0.0, False, BLOCK))
        floor = 0.0  # as is what weighs less
        if tl.abs(top) < float("inf"):  # else there are no probabilities, and nothing more goes
            if p < 1:
                weights = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, V, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    x = tl.load(row + v, mask=v < V, other=float("-inf"))
                    weights += _weight(x, least, top)
                bound = (1.0 - p) * tl.sum(weights, axis=0)
                lo = _key(least).to(tl.int64) - 1
                least = _float(_lowest(row, V, lo, top_key.to(tl.int64), bound, least, top, True, BLOCK))
            if min_p > 0:
                floor = min_p
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row + v, mask=v < V, other=0.0)
            gone = (x < least) | (_weight(x, least, top) < floor)
            tl.store(row + v, tl.where(gone, float("-inf"), x), mask=v < V)


def process_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    ban_ids: torch.Tensor,
    ban_until: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Launch it on contiguous tensors: [R, V]. See trtspec/ops/logits.py; each group of inputs may be zero-size."""
    R, V = logits.shape
    out = torch.empty_like(logits)
    M = ban_ids.shape[1] if ban_ids.numel() else 0
    sizes = (ban_ids.shape[0], temperatures.shape[0], top_ks.shape[0], top_ps.shape[0], min_ps.shape[0])
    process_logits_kernel[(R,)](
        logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps, V, M, *sizes, out,
        BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
