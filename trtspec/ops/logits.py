"""process_logits: all steps between the lm_head and the draw, for each row, in one fixed order."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define


def penalise(logits: Tensor, history: Tensor, prompt_lens: Tensor, penalties: Tensor) -> Tensor:
    """Logits [R, V] after repetition, presence and frequency penalties. Arguments are those of `process_logits`."""
    repetition, presence, frequency = penalties.unbind(1)
    real = history >= 0
    columns = history.clamp(min=0).long()
    is_output = torch.arange(history.shape[1], device=history.device) >= prompt_lens[:, None]
    seen = torch.zeros_like(logits).scatter_add_(1, columns, real.to(logits.dtype)) > 0
    output_count = torch.zeros_like(logits).scatter_add_(1, columns, (real & is_output).to(logits.dtype))
    scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(seen, scaled, logits)
    logits = logits - output_count * frequency[:, None]
    return logits - (output_count > 0).to(logits.dtype) * presence[:, None]


def add_bias(logits: Tensor, bias_ids: Tensor, bias_values: Tensor) -> Tensor:
    """Logits [R, V] with bias_values [R, M] added at bias_ids [R, M]; -1 is padding."""
    values = bias_values.masked_fill(bias_ids < 0, 0.0)
    return logits.scatter_add(1, bias_ids.clamp(min=0).long(), values)


def _ban(logits: Tensor, ban_ids: Tensor, ban_until: Tensor, positions: Tensor) -> Tensor:
    active = (ban_ids >= 0) & (positions[:, None] < ban_until)
    # Inactive entries go to an extra column, which is cut off afterwards.
    target = torch.where(active, ban_ids.long(), logits.shape[1])
    banned = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(banned.scatter_(1, target, True)[:, :-1], float("-inf"))


def _allow(logits: Tensor, allow_mask: Tensor) -> Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = allow_mask[:, ids // 32].long() >> (ids % 32)
    return logits.masked_fill((bits & 1) == 0, float("-inf"))


def _top_k(logits: Tensor, top_ks: Tensor) -> Tensor:
    V = logits.shape[1]
    k = torch.where((top_ks > 0) & (top_ks < V), top_ks, V).long()
    kth = logits.sort(dim=1, descending=True).values.gather(1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))  # all ties with the k-th stay


def _top_p(logits: Tensor, top_ps: Tensor) -> Tensor:
    ascending = logits.sort(dim=1).values
    mass = ascending.softmax(1).cumsum(1)
    dropped = (mass <= 1 - top_ps[:, None]) & (top_ps[:, None] < 1)
    dropped[:, -1] = False  # the most likely token stays
    smallest_kept = ascending.gather(1, dropped.sum(1, keepdim=True))
    return logits.masked_fill(logits < smallest_kept, float("-inf"))


def _min_p(logits: Tensor, min_ps: Tensor) -> Tensor:
    probabilities = logits.softmax(1)
    floor = min_ps[:, None] * probabilities.amax(1, keepdim=True)
    return logits.masked_fill((probabilities < floor) & (min_ps[:, None] > 0), float("-inf"))


def _reference(
    logits: Tensor, positions: Tensor, history: Tensor, prompt_lens: Tensor, penalties: Tensor,
    bias_ids: Tensor, bias_values: Tensor, ban_ids: Tensor, ban_until: Tensor, allow_mask: Tensor,
    temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
) -> Tensor:  # fmt: skip
    out = logits.clone()
    if bias_ids.numel():
        out = add_bias(out, bias_ids, bias_values)
    if penalties.numel():
        out = penalise(out, history, prompt_lens, penalties)
    if ban_ids.numel():
        out = _ban(out, ban_ids, ban_until, positions)
    if allow_mask.numel():
        out = _allow(out, allow_mask)
    if temperatures.numel():
        out = torch.where(temperatures[:, None] > 0, out / temperatures[:, None], out)
    if top_ks.numel():
        out = _top_k(out, top_ks)
    if top_ps.numel():
        out = _top_p(out, top_ps)
    if min_ps.numel():
        out = _min_p(out, min_ps)
    return out


def _fake(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


_op = define(
    "process_logits(Tensor logits, Tensor positions, Tensor history, Tensor prompt_lens, Tensor penalties, "
    "Tensor bias_ids, Tensor bias_values, Tensor ban_ids, Tensor ban_until, Tensor allow_mask, "
    "Tensor temperatures, Tensor top_ks, Tensor top_ps, Tensor min_ps) -> Tensor",
    _reference,
    _fake,
)


def process_logits(
    logits: Tensor, positions: Tensor, history: Tensor, prompt_lens: Tensor, penalties: Tensor,
    bias_ids: Tensor, bias_values: Tensor, ban_ids: Tensor, ban_until: Tensor, allow_mask: Tensor,
    temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
) -> Tensor:  # fmt: skip
    """Bias, penalties, bans, mask -> temperature -> top-k -> top-p -> min-p. Removed tokens are -inf. Returns [R, V].

    logits: [R, V] fp32.
    positions [R] int64: absolute index of the token that each row draws.
    Any group below may be zero-size (unused).

    history [R, L] int32, padded with -1: all tokens before the row's draw, drafts included.
    prompt_lens [R]: number of these tokens that belong to the prompt.
    penalties [R, 3] fp32: repetition (1 = off; over all tokens), presence and frequency (both over the output only).

    bias_ids: [R, M] int32, padded with -1.
    bias_values: [R, M] fp32.

    ban_ids: [R, M] int32, padded with -1.
    ban_until [R, M] int64: a token is banned while positions < ban_until. This serves min_tokens for stop ids; a huge
    value bans for ever.

    allow_mask [R, ceil(V/32)] int32: bit v % 32 of word v // 32 set = allowed.
    temperatures [R] fp32: divides the logits; <= 0 = greedy row, undivided.
    top_ks [R] int32: <= 0 = off; ties with the k-th logit stay.
    top_ps [R] fp32: 1 = off. The rule is transformers': drop the tail whose mass is <= 1 - p. Ties stay, and at least
    one token stays.
    min_ps [R] fp32: 0 = off; drops p < min_p * p_max.
    """
    return cast(
        Tensor,
        _op(
            logits, positions, history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask,
            temperatures, top_ks, top_ps, min_ps,
        ),
    )  # fmt: skip
