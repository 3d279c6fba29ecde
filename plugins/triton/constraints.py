"""process_logits with biases and penalties, in one launch: the form of TensorRT's plugin.

A program has one row of logits. The row of results first holds a mark for each token: how often the output has it, and
whether the prompt and the biases name it. Marks are set by atomic operations whose order does not matter. Then each
mark is replaced by the logit that follows from it. So no other memory is needed, and the time grows with V + L, not
with V L. Logits have the reference's bits.

No metadata, however wrong, makes it read or write past a tensor. The ids of a row's biases must differ.
"""

from __future__ import annotations

import triton
import triton.language as tl
from trtspec_plugins.triton.logits import process_row_kernel

_IN_PROMPT = tl.constexpr(1 << 30)
_BIASED = tl.constexpr(1 << 29)
_COUNT = tl.constexpr((1 << 29) - 1)


@triton.jit
def _penalised(x, mark, repetition, presence, frequency):
    count = (mark & _COUNT).to(tl.float32)
    scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where((mark & (_IN_PROMPT | _COUNT)) != 0, scaled, x)
    x = x - count * frequency
    return x - tl.where(count > 0, presence, 0.0)


@triton.jit
def _constrain(
    r, logits, history, prompt_lens, bias_ids, bias_values, V, L, N, repetition, presence, frequency,
    is_penalised, out, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write a row's logits after biases and penalties."""
    row = r.to(tl.int64) * V
    marks = (out + row).to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        tl.store(marks + v, tl.zeros((BLOCK,), tl.int32), mask=v < V)
    tl.debug_barrier()  # other threads set these marks next
    if is_penalised:
        prompt_len = tl.load(prompt_lens + r)
        for start in range(0, L, LANES):
            j = start + tl.arange(0, LANES)
            token = tl.load(history + r.to(tl.int64) * L + j, mask=j < L, other=-1)
            known = (token >= 0) & (token < V)
            in_prompt = j < prompt_len
            tl.atomic_or(marks + token, tl.full((LANES,), _IN_PROMPT, tl.int32), mask=known & in_prompt, sem="relaxed")
            tl.atomic_add(marks + token, tl.full((LANES,), 1, tl.int32), mask=known & ~in_prompt, sem="relaxed")
    for start in range(0, N, LANES):
        n = start + tl.arange(0, LANES)
        token = tl.load(bias_ids + r.to(tl.int64) * N + n, mask=n < N, other=-1)
        known = (token >= 0) & (token < V)
        tl.atomic_or(marks + token, tl.full((LANES,), _BIASED, tl.int32), mask=known, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row + v, mask=v < V, other=0.0)
        mark = tl.load(marks + v, mask=v < V, other=_BIASED)
        x = _penalised(x, mark, repetition, presence, frequency)
        tl.store(out + row + v, x, mask=(mark & _BIASED) == 0)
    tl.debug_barrier()
    for start in range(0, N, LANES):
        n = start + tl.arange(0, LANES)
        token = tl.load(bias_ids + r.to(tl.int64) * N + n, mask=n < N, other=-1)
        known = (token >= 0) & (token < V)
        x = tl.load(logits + row + token, mask=known, other=0.0)
        x += tl.load(bias_values + r.to(tl.int64) * N + n, mask=n < N, other=0.0)
        mark = tl.load(marks + token, mask=known, other=0)
        tl.store(out + row + token, _penalised(x, mark, repetition, presence, frequency), mask=known)
    tl.debug_barrier()


@triton.jit
def process_constrained_logits_kernel(
    logits,  # [R, V] fp32
    positions,  # [R] int64
    history,  # [R, L] int32
    prompt_lens,  # [R] int64
    penalties,  # [R, kinds] fp32; kinds: 3, or 0 if the group is unused
    bias_ids,  # [R, N] int32; N: 0 if the group is unused
    bias_values,  # [R, N] fp32
    ban_ids,
    ban_until,
    allow_mask,  # [R, words] int32; words: ceil(V / 32), or any other number if the group is unused
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    V,
    L,
    kinds,
    N,
    M,
    num_bans,
    words,
    num_temperatures,
    num_top_ks,
    num_top_ps,
    num_min_ps,
    out,  # [R, V] fp32
    LANES: tl.constexpr,
):
    """process_row_kernel, whose other arguments these are, after biases and penalties."""
    r = tl.program_id(0)
    BLOCK: tl.constexpr = 16 * LANES
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if kinds == 3:
        repetition = tl.load(penalties + r * 3)
        presence = tl.load(penalties + r * 3 + 1)
        frequency = tl.load(penalties + r * 3 + 2)
    is_penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    constrained = logits
    if is_penalised | (N > 0):
        _constrain(
            r, logits, history, prompt_lens, bias_ids, bias_values, V, L, N, repetition, presence, frequency,
            is_penalised, out, BLOCK, LANES,
        )  # fmt: skip
        constrained = out
    num_masks = tl.where(words == tl.cdiv(V, 32), r + 1, 0)
    process_row_kernel(
        constrained, positions, ban_ids, ban_until, allow_mask, temperatures, top_ks, top_ps, min_ps, V, M,
        num_bans, num_masks, num_temperatures, num_top_ks, num_top_ps, num_min_ps, out, LANES,
    )  # fmt: skip
