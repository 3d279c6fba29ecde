"""process_logits. Short rows: one program for each row, in one launch. Long rows: many programs, in a launch per look.

Both forms do the same steps (filters.py), and sums are exact, so both give the same bits. A row's result depends
neither on the form nor on the other rows. TensorRT's plugin uses the first form, as it launches one kernel.

Logits that stay have the reference's bits: bans and temperature are the reference's operations, and filters remove or
keep. top-k removes what the reference removes. top-p and min-p may decide otherwise about a token within rounding
errors of the edge. exp is the GPU's, and the reference's sums are rounded where these are not.

A row of V logits is 4 V bytes. The long form reads and writes it once to prepare it, and reads it once more for its
maximum. It reads it 8 times for top-k and 8 times for top-p, and reads and writes it to remove tokens. That takes at
most 18 launches, or one if no row is filtered. Programs whose row has a filter off return at once.
Grids follow from shapes alone and nothing is read back, so that CUDA graphs can hold the launches. Each launch stores
its results for the next one in separate memory: no program reads what another of its launch writes, and there are no
atomics.

No metadata, however wrong, makes it read or write past a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from trtspec_plugins.triton.filters import (
    DEPTH,
    LOOKS,
    NO_LIMIT,
    cut,
    descend,
    highest,
    number,
    prepare,
    settings,
    tally,
)

from trtspec.ops.logits import add_bias, penalise

LANES = 256  # threads of a program
CHUNK = 4096  # tokens of a program; rows of at most this many are not split


# -- short rows --------------------------------------------------------------------------------------------------------


@triton.jit
def _search(row, V, rest, least, top, p, MASS: tl.constexpr, LANES: tl.constexpr):
    """The lowest ordinal with more than `rest` at or below it; the greatest of all ordinals if there is none."""
    prefix = tl.full((), 0, tl.uint32)
    for look in range(LOOKS):
        tallies = tally(row, 0, V, prefix, look, least, top, MASS, LANES)
        prefix, rest = descend(tallies, prefix, rest, look, p, MASS)
    return prefix


@triton.jit
def process_row_kernel(
    logits,  # [R, V] fp32
    positions,  # [R] int64
    ban_ids,  # [R, M] int32
    ban_until,  # [R, M] int64
    allow_mask,  # [R, ceil(V / 32)] int32
    temperatures,  # [R] fp32
    top_ks,  # [R] int32
    top_ps,  # [R] fp32
    min_ps,  # [R] fp32
    V,
    M,
    num_bans,  # rows of ban_ids: R, or 0 if the group is unused and its pointer may be anything; likewise below
    num_masks,
    num_temperatures,
    num_top_ks,
    num_top_ps,
    num_min_ps,
    out,  # [R, V] fp32
    LANES: tl.constexpr,
):
    r = tl.program_id(0)
    BLOCK: tl.constexpr = 16 * LANES
    prepare(
        r, 0, V, logits, positions, ban_ids, ban_until, allow_mask, temperatures, V, M,
        num_bans, num_masks, num_temperatures, out, BLOCK,
    )  # fmt: skip
    k, p, min_p = settings(r, top_ks, top_ps, min_ps, num_top_ks, num_top_ps, num_min_ps, V)
    if (k > 0) | (p < 1) | (min_p > 0):
        row = out + r.to(tl.int64) * V
        last = highest(row, 0, V, BLOCK).to(tl.uint32)
        top = number(last)
        least = NO_LIMIT
        zero = tl.full((), 0, tl.int64)
        if k > 0:
            least = number(_search(row, V, zero + (V - k), least, top, p, False, LANES))
        if tl.abs(top) < float("inf"):  # else there are no probabilities, and no more tokens are removed
            if p < 1:
                least = number(tl.minimum(_search(row, V, zero, least, top, p, True, LANES), last))
        else:
            min_p = 0.0
        cut(row, 0, V, least, top, min_p, BLOCK)


@triton.jit
def process_logits_kernel(
    logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps, V, M,
    num_bans, num_temperatures, num_top_ks, num_top_ps, num_min_ps, out, LANES: tl.constexpr,
):  # fmt: skip
    """Launch form of `process_row_kernel` without allow_mask among the arguments."""
    process_row_kernel(
        logits, positions, ban_ids, ban_until, ban_ids, temperatures, top_ks, top_ps, min_ps, V, M,
        num_bans, 0, num_temperatures, num_top_ks, num_top_ps, num_min_ps, out, LANES,
    )  # fmt: skip


# -- long rows: program (r, s) has chunk s of row r -----------------------------------------------------------------


@triton.jit
def prepare_kernel(
    logits, positions, ban_ids, ban_until, allow_mask, temperatures, V, M, num_bans, num_masks, num_temperatures,
    out,
    maxima,  # [R, S] int64: ordinals
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    r, s = tl.program_id(0), tl.program_id(1)
    BLOCK: tl.constexpr = 16 * LANES
    begin = s * CHUNK
    end = tl.minimum(begin + CHUNK, V)
    prepare(
        r, begin, end, logits, positions, ban_ids, ban_until, allow_mask, temperatures, V, M,
        num_bans, num_masks, num_temperatures, out, BLOCK,
    )  # fmt: skip
    tl.store(maxima + r * tl.num_programs(1) + s, highest(out + r.to(tl.int64) * V, begin, end, BLOCK))


@triton.jit
def _last(maxima, r, PARTS: tl.constexpr):
    """The highest ordinal of a row."""
    S, part = tl.num_programs(1), tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + r * S + part, mask=part < S, other=0), axis=0).to(tl.uint32)


@triton.jit
def _after(states, tallies, r, look, p, MASS: tl.constexpr, PARTS: tl.constexpr):
    """(prefix, rest) after a look whose tallies an earlier launch stored."""
    S, digit = tl.num_programs(1), tl.arange(0, 16)
    part = tl.arange(0, PARTS)[:, None]
    place = (MASS * LOOKS + look) * tl.num_programs(0) + r
    prefix = tl.load(states + place * 2).to(tl.uint32)
    rest = tl.load(states + place * 2 + 1)
    counted = tl.load(tallies + (place.to(tl.int64) * S + part) * 16 + digit, mask=part < S, other=0)
    return descend(tl.sum(counted, axis=0), prefix, rest, look, p, MASS)


@triton.jit(do_not_specialize=["look"])
def look_kernel(
    out,  # [R, V] fp32, as prepared
    maxima,  # [R, S] int64
    top_ks,
    top_ps,
    num_top_ks,
    num_top_ps,
    V,
    look,
    leasts,  # [R] fp32: least logit that top-k keeps; written by top-p's first look
    states,  # [2, LOOKS, R, 2] int64: (prefix, rest) of each look of top-k and of top-p
    tallies,  # [2, LOOKS, R, S, 16] int64
    MASS: tl.constexpr,  # top-p, not top-k
    PARTS: tl.constexpr,  # at least S
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    r, s = tl.program_id(0), tl.program_id(1)
    k, p, _ = settings(r, top_ks, top_ps, top_ps, num_top_ks, num_top_ps, 0, V)
    top = 0.0
    wanted = k > 0
    if MASS:
        top = number(_last(maxima, r, PARTS))
        wanted = (p < 1) & (tl.abs(top) < float("inf"))
    if wanted:
        least = NO_LIMIT
        prefix = tl.full((), 0, tl.uint32)
        rest = tl.full((), 0, tl.int64)
        if not MASS:
            rest += V - k
        if look > 0:
            prefix, rest = _after(states, tallies, r, look - 1, p, MASS, PARTS)
        if MASS:
            if look > 0:
                least = tl.load(leasts + r)
            elif k > 0:
                least = number(_after(states, tallies, r, LOOKS - 1, p, False, PARTS)[0])
        place = (MASS * LOOKS + look) * tl.num_programs(0) + r
        if s == 0:
            tl.store(states + place * 2, prefix.to(tl.int64))
            tl.store(states + place * 2 + 1, rest)
            if MASS & (look == 0):
                tl.store(leasts + r, least)
        begin = s * CHUNK
        end = tl.minimum(begin + CHUNK, V)
        counted = tally(out + r.to(tl.int64) * V, begin, end, prefix, look, least, top, MASS, LANES)
        mine = (place.to(tl.int64) * tl.num_programs(1) + s) * 16
        tl.store(tallies + mine + tl.arange(0, 16), counted)


@triton.jit
def cut_kernel(
    out, maxima, top_ks, top_ps, min_ps, num_top_ks, num_top_ps, num_min_ps, V, states, tallies,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    k, p, min_p = settings(r, top_ks, top_ps, min_ps, num_top_ks, num_top_ps, num_min_ps, V)
    if (k > 0) | (p < 1) | (min_p > 0):
        last = _last(maxima, r, PARTS)
        top = number(last)
        least = NO_LIMIT
        if k > 0:
            least = number(_after(states, tallies, r, LOOKS - 1, p, False, PARTS)[0])
        if tl.abs(top) < float("inf"):  # as in process_row_kernel
            if p < 1:
                least = number(tl.minimum(_after(states, tallies, r, LOOKS - 1, p, True, PARTS)[0], last))
        else:
            min_p = 0.0
        begin = tl.program_id(1) * CHUNK
        end = tl.minimum(begin + CHUNK, V)
        cut(out + r.to(tl.int64) * V, begin, end, least, top, min_p, 16 * LANES)


# -- launches ----------------------------------------------------------------------------------------------------------


def _lanes(tokens: int) -> int:
    """Number of threads of a program with `tokens` tokens."""
    return min(max(triton.next_power_of_2(triton.cdiv(tokens, DEPTH.value)), 32), LANES)


def _rows(group: torch.Tensor) -> int:
    """Number of rows of a group of inputs that is used. A group that is not may have rows without elements."""
    return group.shape[0] if group.numel() else 0


def process_rows(
    logits: torch.Tensor, positions: torch.Tensor, ban_ids: torch.Tensor, ban_until: torch.Tensor,
    allow_mask: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Apply bans to min-p in one launch, on contiguous tensors: [R, V]. Each group of inputs may be zero-size."""
    R, V = logits.shape
    out = torch.empty_like(logits)
    M = ban_ids.shape[1] if ban_ids.numel() else 0
    groups = (ban_ids, allow_mask, temperatures, top_ks, top_ps, min_ps)
    lanes = _lanes(V)
    process_row_kernel[(R,)](
        logits, positions, ban_ids, ban_until, allow_mask, temperatures, top_ks, top_ps, min_ps,
        V, M, *map(_rows, groups), out,
        LANES=lanes, num_warps=lanes // 32, enable_fp_fusion=False,
        maxnreg=255,  # without it, the assembler takes fewer for sm_80, and spills
    )  # fmt: skip
    return out


def process_spread(
    logits: torch.Tensor, positions: torch.Tensor, ban_ids: torch.Tensor, ban_until: torch.Tensor,
    allow_mask: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, chunk: int = CHUNK,
) -> torch.Tensor:  # fmt: skip
    """Apply bans to min-p as `process_rows` does, with a program for every `chunk` tokens of a row."""
    R, V = logits.shape
    S = triton.cdiv(V, chunk)
    out, maxima = torch.empty_like(logits), positions.new_empty((R, S))
    M = ban_ids.shape[1] if ban_ids.numel() else 0
    lanes = _lanes(min(V, chunk))
    options = {"CHUNK": chunk, "LANES": lanes, "num_warps": lanes // 32, "enable_fp_fusion": False}
    prepare_kernel[(R, S)](
        logits, positions, ban_ids, ban_until, allow_mask, temperatures,
        V, M, *map(_rows, (ban_ids, allow_mask, temperatures)), out, maxima, **options,
    )  # fmt: skip
    num_top_ks, num_top_ps, num_min_ps = top_ks.shape[0], top_ps.shape[0], min_ps.shape[0]
    if not (num_top_ks or num_top_ps or num_min_ps):
        return out
    looks, parts = LOOKS.value, triton.next_power_of_2(S)
    leasts = logits.new_empty(R)
    states, tallies = positions.new_empty((2, looks, R, 2)), positions.new_empty((2, looks, R, S, 16))
    for mass in [False] * (num_top_ks > 0) + [True] * (num_top_ps > 0):
        for look in range(looks):
            look_kernel[(R, S)](
                out, maxima, top_ks, top_ps, num_top_ks, num_top_ps, V, look, leasts, states, tallies,
                MASS=mass, PARTS=parts, **options,
            )  # fmt: skip
    cut_kernel[(R, S)](
        out, maxima, top_ks, top_ps, min_ps, num_top_ks, num_top_ps, num_min_ps, V, states, tallies,
        PARTS=parts, **options,
    )  # fmt: skip
    return out


def process_logits(
    logits: torch.Tensor, positions: torch.Tensor, history: torch.Tensor, prompt_lens: torch.Tensor,
    penalties: torch.Tensor, bias_ids: torch.Tensor, bias_values: torch.Tensor, ban_ids: torch.Tensor,
    ban_until: torch.Tensor, allow_mask: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor,
    top_ps: torch.Tensor, min_ps: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The op of trtspec/ops/logits.py: [R, V].

    The reference's code applies bias and penalties, which few requests ask for.
    """
    if bias_ids.numel():
        logits = add_bias(logits, bias_ids, bias_values)
    if penalties.numel():
        logits = penalise(logits, history, prompt_lens, penalties)
    form = process_rows if logits.shape[1] <= CHUNK else process_spread
    groups = (positions, ban_ids, ban_until, allow_mask, temperatures, top_ks, top_ps, min_ps)
    return form(logits.contiguous(), *(group.contiguous() for group in groups))
