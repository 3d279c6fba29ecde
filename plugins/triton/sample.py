"""spec_sample: one program a row of logits, the noise made where it is added (its layout: trtspec/ops/sample.py).

Without vocab_ids a counter serves four tokens, as ids run through 0..V-1; with them each token has one of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # counters at a time
NUM_WARPS = 8


@triton.jit
def _philox(k0, k1, c0, c1, c2):
    """Philox4x32-10 with fourth counter word 0; uint32 in, four uint32 out."""
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log(x):
    """Natural log of positive normal numbers: the reference's operations, in its order, each rounded once."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = mantissa < 0.70710678
    power = (exponent - small.to(tl.int32)).to(tl.float32)
    f = tl.where(small, mantissa + mantissa, mantissa) - 1.0
    square = f * f
    y = f * 7.0376836292e-2 - 1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f - 1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f - 1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f - 2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f * square
    y = y + power * -2.12194440e-4
    y = y - square * 0.5
    return (f + y) + power * 0.693359375


@triton.jit
def _gumbel(word):
    u = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -_log(-_log(u))


@triton.jit
def spec_sample_kernel(
    logits,  # [R, V] fp32
    greedy,  # [R] bool
    seeds,  # [R] int64, or anything where num_seeds is 0
    positions,  # [R] int64
    vocab_ids,  # [V] int64, or anything where not OWN_IDS
    V,
    num_seeds,
    tokens,  # [R] int64
    OWN_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    NONE: tl.constexpr = 9223372036854775807  # 2^63 - 1
    noisy = False
    k0 = tl.full((), 0, tl.uint32)
    k1 = tl.full((), 0, tl.uint32)
    if num_seeds > 0:
        noisy = tl.load(greedy + row) == 0
        seed = tl.load(seeds + row)
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
    t = tl.load(positions + row)
    LANES: tl.constexpr = 1 if OWN_IDS else 4  # tokens of a counter
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), NONE, tl.int64)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tl.cdiv(V, LANES), BLOCK):
        counter = start + tl.arange(0, BLOCK)
        if OWN_IDS:
            ids = tl.load(vocab_ids + counter, mask=counter < V, other=0)
            c0 = (ids >> 2).to(tl.uint32)
        else:
            ids = counter.to(tl.int64) * 4
            c0 = counter.to(tl.uint32)
        w0 = tl.zeros((BLOCK,), tl.uint32)
        w1, w2, w3 = w0, w0, w0
        if noisy:
            c1 = tl.zeros((BLOCK,), tl.uint32) + t.to(tl.uint32)
            c2 = tl.zeros((BLOCK,), tl.uint32) + (t >> 32).to(tl.uint32)
            w0, w1, w2, w3 = _philox(k0, k1, c0, c1, c2)
        for lane in tl.static_range(LANES):
            if OWN_IDS:
                place = counter
                mine = ids
                word = tl.where(ids & 2 == 0, tl.where(ids & 1 == 0, w0, w1), tl.where(ids & 1 == 0, w2, w3))
            else:
                place = counter * 4 + lane
                mine = ids + lane
                word = w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3
            score = tl.load(logits + row * V + place, mask=place < V, other=float("-inf"))
            if noisy:
                score = score + _gumbel(word)
            broken = broken | (score != score).to(tl.int32)
            better = (score > best) | ((score == best) & (mine < best_id))
            better = better & (score > float("-inf"))
            best = tl.where(better, score, best)
            best_id = tl.where(better, mine, best_id)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_id, NONE), axis=0)
    if tl.max(broken, axis=0) > 0:
        token = tl.full((), NONE, tl.int64)
    tl.store(tokens + row, token)


@triton.jit
def spec_sample_dense_kernel(
    logits, greedy, seeds, positions, V, num_seeds, tokens, OWN_IDS: tl.constexpr, BLOCK: tl.constexpr
):
    """The same without vocab_ids among the arguments."""
    spec_sample_kernel(logits, greedy, seeds, positions, seeds, V, num_seeds, tokens, OWN_IDS, BLOCK)


def spec_sample(
    logits: torch.Tensor,
    greedy: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_ids: torch.Tensor,
) -> torch.Tensor:
    """Launch it on contiguous tensors: tokens [R] int64. Arguments: trtspec/ops/sample.py."""
    R, V = logits.shape
    tokens = positions.new_empty(R)
    sizes = (V, seeds.numel())
    options = {"BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    if vocab_ids.numel():
        arguments = (logits, greedy, seeds, positions, vocab_ids, *sizes, tokens)
        spec_sample_kernel[(R,)](*arguments, OWN_IDS=True, **options)
    else:
        spec_sample_dense_kernel[(R,)](logits, greedy, seeds, positions, *sizes, tokens, OWN_IDS=False, **options)
    return tokens
