"""spec_sample: the kernels make the noise where they add it. trtspec/ops/sample.py describes its layout.

Without vocab_ids a counter serves four tokens, as ids run through 0..V-1. With vocab_ids each token has a counter of
its own.

A long row is spread over programs of PART tokens, and a second launch takes the best of their draws. Each token's 4
bytes are read once. About a hundred integer and fp32 operations make its noise, or none if no token is left to draw. A
short row has one program in one launch, as every row has in TensorRT's plugin. The draw is the same, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tokens that a program loads at a time
NUM_WARPS = 8
PART = 4096  # tokens of a program
NONE = tl.constexpr(9223372036854775807)  # 2^63 - 1


@triton.jit
def _philox(k0, k1, c0, t):
    """Philox4x32-10 of counters (c0, t, t >> 32, 0). All inputs but t are uint32; returns four uint32."""
    c3 = tl.zeros_like(c0)
    c1 = c3 + t.to(tl.uint32)
    c2 = c3 + (t >> 32).to(tl.uint32)
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
def own_noise(ids, k0, k1, t):
    """Noise of any ids, with a counter for each."""
    w0, w1, w2, w3 = _philox(k0, k1, (ids >> 2).to(tl.uint32), t)
    return _gumbel(tl.where(ids & 2 == 0, tl.where(ids & 1 == 0, w0, w1), tl.where(ids & 1 == 0, w2, w3)))


@triton.jit
def dense_noise(start, k0, k1, t, BLOCK: tl.constexpr):
    """Noise of ids start .. start + BLOCK - 1, with a counter for four of them. start is a multiple of 4."""
    w0, w1, w2, w3 = _philox(k0, k1, (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32), t)
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,)))


@triton.jit
def _best(
    row, begin, end, logits, greedy, seeds, positions, vocab_ids, V, num_seeds,
    OWN_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(score, id) of the draw from tokens begin <= v < end: NaN if a score is NaN, (-inf, NONE) if no token is left."""
    noisy = False
    k0 = tl.full((), 0, tl.uint32)
    k1 = tl.full((), 0, tl.uint32)
    if num_seeds > 0:
        noisy = tl.load(greedy + row) == 0
        seed = tl.load(seeds + row)
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
    t = tl.load(positions + row)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.full((), NONE, tl.int64)
    broken = tl.full((), 0, tl.int32)
    for start in range(begin, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        score = tl.load(logits + row * V + v, mask=v < end, other=float("-inf"))
        broken |= tl.max((score != score).to(tl.int32), axis=0)
        score = tl.where(score != score, float("-inf"), score)
        ids = tl.load(vocab_ids + v, mask=v < end, other=0) if OWN_IDS else v.to(tl.int64)
        if noisy & (tl.max(score, axis=0) > float("-inf")):
            score += own_noise(ids, k0, k1, t) if OWN_IDS else dense_noise(start, k0, k1, t, BLOCK)
        top = tl.max(score, axis=0)
        token = tl.min(tl.where((score == top) & (score > float("-inf")), ids, NONE), axis=0)
        if (top > best) | ((top == best) & (token < best_id)):
            best = top
            best_id = token
    return tl.where(broken > 0, float("nan"), best), best_id


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
    score, token = _best(row, 0, V, logits, greedy, seeds, positions, vocab_ids, V, num_seeds, OWN_IDS, BLOCK)
    tl.store(tokens + row, tl.where(score != score, NONE, token))


@triton.jit
def spec_sample_dense_kernel(
    logits, greedy, seeds, positions, V, num_seeds, tokens, OWN_IDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Launch form of `spec_sample_kernel` without vocab_ids among the arguments."""
    spec_sample_kernel(logits, greedy, seeds, positions, seeds, V, num_seeds, tokens, OWN_IDS, BLOCK)


@triton.jit
def sample_part_kernel(
    logits, greedy, seeds, positions, vocab_ids, V, num_seeds,
    scores,  # [R, S] fp32
    ids,  # [R, S] int64
    OWN_IDS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, s) draws from part s of row r. Inputs are those of spec_sample_kernel."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = s * PART
    end = tl.minimum(begin + PART, V)
    score, token = _best(row, begin, end, logits, greedy, seeds, positions, vocab_ids, V, num_seeds, OWN_IDS, BLOCK)
    place = row * tl.num_programs(1) + s
    tl.store(scores + place, score)
    tl.store(ids + place, token)


@triton.jit
def sample_best_kernel(scores, ids, S, tokens, PARTS: tl.constexpr):
    """Take the best draw of a row's parts, of which there are at most PARTS. Equal draws go to the lowest id."""
    row, s = tl.program_id(0), tl.arange(0, PARTS)
    score = tl.load(scores + row * S + s, mask=s < S, other=float("-inf"))
    token = tl.load(ids + row * S + s, mask=s < S, other=NONE)
    broken = tl.max((score != score).to(tl.int32), axis=0) > 0
    score = tl.where(score != score, float("-inf"), score)
    best = tl.min(tl.where(score == tl.max(score, axis=0), token, NONE), axis=0)
    tl.store(tokens + row, tl.where(broken, NONE, best))


def spec_sample(
    logits: torch.Tensor,
    greedy: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_ids: torch.Tensor,
) -> torch.Tensor:
    """The op of trtspec/ops/sample.py: draw one token for each row, tokens [R] int64."""
    R, V = logits.shape
    S = triton.cdiv(V, PART)
    tokens = positions.new_empty(R)
    inputs = [tensor.contiguous() for tensor in (logits, greedy, seeds, positions, vocab_ids)]
    sizes = (V, seeds.numel())
    options = {
        "OWN_IDS": vocab_ids.numel() > 0,
        "BLOCK": min(BLOCK, max(triton.next_power_of_2(V), 128)),
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
    }
    if S == 1:
        spec_sample_kernel[(R,)](*inputs, *sizes, tokens, **options)
        return tokens
    scores, ids = logits.new_empty((R, S)), positions.new_empty((R, S))
    sample_part_kernel[(R, S)](*inputs, *sizes, scores, ids, PART=PART, **options)
    parts = triton.next_power_of_2(S)
    sample_best_kernel[(R,)](scores, ids, S, tokens, PARTS=parts, num_warps=1, enable_fp_fusion=False)
    return tokens
