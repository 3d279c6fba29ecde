"""spec_sample: the drafter-invariant draw, arg-max of processed logits + counter-based Gumbel noise.

The noise is a pure function G(seed, t, v): seed is the request's, t is the absolute index of the token being drawn, and
v is its id in the *target's* vocabulary. So the draw depends on prompt, seed and parameters alone, never on the batch,
on K or on the mode. A draft that draws with the same G agrees with the target as often as their distributions allow
(Gumbel coupling; Daliri et al., "Coupling without communication and drafter-invariant speculative decoding").

Layout, the same in every kernel:

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")
    key     = (seed & 0xffffffff, seed >> 32)
    counter = (v >> 2, t & 0xffffffff, t >> 32, 0); the fourth word tells uses apart (0 = this draw)
    x       = word v & 3 of the output
    u       = ((x >> 9) + 0.5) * 2^-23, exact in fp32, in (0, 1) exclusive
    G       = -log(-log(u)) with the log below, built from single IEEE fp32 operations: the same bits everywhere
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
# Minimax polynomial of log(1 + f) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first (Cephes logf).
LOG_COEFFICIENTS = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, use: int = 0) -> Tensor:
    """Philox4x32-10. seeds and counters int64 (any shapes that broadcast) -> [..., 4] int64 words in [0, 2^32).

    A round multiplies words 0 and 2 and keeps the low halves as words 3 and 1. It mixes the high halves with the old
    words 3 and 1 into words 2 and 0. Both products are computed at once: `even` is words (0, 2) before even rounds, (2,
    0) before odd ones.
    """
    shape = (seeds + c0 + c1 + c2).shape
    even = torch.stack((c0.expand(shape), c2.expand(shape)))
    odd = torch.stack((torch.full_like(c0, use).expand(shape), c1.expand(shape)))  # words that each row is mixed with
    rounds = torch.arange(10, device=seeds.device)
    key0 = ((seeds & _MASK)[..., None] + rounds * W0) & _MASK
    key1 = (((seeds >> 32) & _MASK)[..., None] + rounds * W1) & _MASK
    keys = torch.stack((key1, key0)).unbind(-1), torch.stack((key0, key1)).unbind(-1)
    # Made on the device: a CUDA graph cannot copy from the host.
    factor = torch.where(torch.arange(2, device=seeds.device) == 0, M0, M1).view(2, *[1] * len(shape))
    factors = factor, factor.flip(0)
    for r in range(10):
        product = even * factors[r % 2]  # int64 wraps, which leaves all 64 bits right
        even = (product >> 32).bitwise_and_(_MASK).bitwise_xor_(odd).bitwise_xor_(keys[r % 2][r])
        odd = product.bitwise_and_(_MASK).flip(0)
    return torch.stack((even[0], odd[1], even[1], odd[0]), dim=-1)


def _log(x: Tensor) -> Tensor:
    """Natural log of positive normal fp32 numbers to about one ulp; every step is one correctly rounded operation."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # [0.5, 1)
    small = mantissa < 0.70710678
    exponent = (exponent - small.to(torch.int32)).to(torch.float32)
    f = torch.where(small, mantissa + mantissa, mantissa) - 1.0
    square = f * f
    poly = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        poly = poly.mul_(f).add_(coefficient)
    y = poly.mul_(f).mul_(square)
    y = y.add_(exponent * -2.12194440e-4)
    y = y.sub_(square.mul_(0.5))
    return (f + y) + exponent * 0.693359375


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_ids: Tensor) -> Tensor:
    """Standard Gumbel noise G(seed, t, v): seeds [R], positions t [R], vocab_ids v [V], all int64 -> [R, V] fp32."""
    return noise_of(seeds, positions, vocab_ids.expand(positions.shape[0], -1))


def noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor, log: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Standard Gumbel noise G(seed, t, v) of other tokens v in each row.

    seeds [R], positions t [R], tokens [R, n], all int64 -> [R, n] fp32. log: None = the one with the same bits
    everywhere. torch's suffices where nothing is drawn, and is faster.
    """
    log = log or _log
    t = positions[:, None]
    words = philox(seeds[:, None], tokens >> 2, t & _MASK, (t >> 32) & _MASK)  # [R, n, 4]
    lane = tokens & 3
    x = words.gather(2, lane[..., None])[..., 0]
    u = ((x >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -log(-log(u))


def scalar_noise(seed: int, position: int, token: int) -> float:
    """G(seed, t, v) of one token on the host, to about the precision of fp32."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    words = [token >> 2, position & _MASK, (position >> 32) & _MASK, 0]
    for _ in range(10):
        low, high = M0 * words[0], M1 * words[2]
        words = [(high >> 32) ^ words[1] ^ key0, high & _MASK, (low >> 32) ^ words[3] ^ key1, low & _MASK]
        key0, key1 = (key0 + W0) & _MASK, (key1 + W1) & _MASK
    u = ((words[token & 3] >> 9) + 0.5) * 2.0**-23
    return -math.log(-math.log(u))


def _dense_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_noise` for ids 0..V-1, with one counter for four ids instead of one for each."""
    quads = torch.arange(-(-vocab_size // 4), device=seeds.device)
    t = positions[:, None]
    words = philox(seeds[:, None], quads[None, :], t & _MASK, (t >> 32) & _MASK)
    x = words.flatten(1)[:, :vocab_size]
    u = ((x >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -_log(-_log(u))


def _reference(logits: Tensor, greedy: Tensor, seeds: Tensor, positions: Tensor, vocab_ids: Tensor) -> Tensor:
    V = logits.shape[1]
    if seeds.numel():
        own = vocab_ids.numel() > 0
        noise = gumbel_noise(seeds, positions, vocab_ids) if own else _dense_noise(seeds, positions, V)
        logits = torch.where(greedy[:, None], logits, logits + noise)
    ids = vocab_ids if vocab_ids.numel() else torch.arange(V, device=logits.device)
    top = logits.amax(1, keepdim=True)
    best = (logits == top) & (top > float("-inf"))
    # Ties go to the lowest target id. A row of NaNs, or with every token removed, has no best token. It gives the
    # out-of-range id that the host refuses.
    return torch.where(best, ids, torch.iinfo(torch.int64).max).amin(1)


def _fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


_op = define(
    "spec_sample(Tensor logits, Tensor greedy, Tensor seeds, Tensor positions, Tensor vocab_ids) -> Tensor",
    _reference,
    _fake,
)


def spec_sample(logits: Tensor, greedy: Tensor, seeds: Tensor, positions: Tensor, vocab_ids: Tensor) -> Tensor:
    """Draw one token for each row: logits [R, V] fp32 (processed) -> [R] int64, ids in the target's vocabulary.

    greedy [R] bool: rows without noise.
    seeds: [R] int64, or zero-size when every row is greedy.
    positions [R] int64: absolute index of the token being drawn.
    vocab_ids [V] int64: target id of each column, or zero-size when the vocabularies are the same. A draft with its own
    vocabulary has i + d2t[i].
    A row with NaN logits, or nothing but -inf, returns 2^63 - 1.
    """
    return cast(Tensor, _op(logits, greedy, seeds, positions, vocab_ids))
