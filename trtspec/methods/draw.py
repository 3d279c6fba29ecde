"""Drawing tokens from logits: those of the target, and drafts, which are drawn with the target's noise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtspec.core import LogitConstraints, SamplingTensors
from trtspec.ops import process_logits, spec_sample
from trtspec.ops.sample import noise_of


def draw_children(
    logits: Tensor,
    sampling: SamplingTensors,
    target_ids: Tensor,
    draft_ids: Tensor,
    count: int,
    scored: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Draw `count` different drafts from each row of draft logits [R, Vd] fp32: target ids [R, count] int64, scores.

    The first is what `draw_drafts` draws. Each further one is drawn, with the same noise, from what is left. Where a
    row's filters leave less, the first is repeated. The scores [R, count] fp32 are the processed logits plus noise,
    -inf for a draft that is repeated; None unless `scored`. target_ids, draft_ids: as in draw_drafts.
    """
    sampling = _banned_drafts(sampling, draft_ids)
    logits = process(logits, sampling)
    drawn, values = list[Tensor](), list[Tensor]()
    for _ in range(count):
        tokens = spec_sample(logits, sampling.greedy, sampling.seeds, sampling.positions, target_ids)
        known = tokens < draft_ids.shape[0]
        first = drawn[0] if drawn else tokens.clamp(max=draft_ids.shape[0] - 1)
        drawn.append(torch.where(known, tokens, first))
        column = draft_ids[drawn[-1]].clamp(min=0)[:, None]
        values.append(logits.gather(1, column)[:, 0])
        logits = logits.scatter(1, column, float("-inf"))
    children = torch.stack(drawn, 1)
    if not scored:
        return children, None
    scores = torch.stack(values, 1)
    if sampling.seeds.shape[0]:
        noise = noise_of(sampling.seeds, sampling.positions, children, torch.log)
        scores = torch.where(sampling.greedy[:, None], scores, scores + noise)
    return children, scores


def draw(
    logits: Tensor,
    sampling: SamplingTensors,
    vocab_ids: Tensor | None = None,
    constraints: LogitConstraints | None = None,
) -> Tensor:
    """Process logits [R, V] fp32 as each row asks, then sample: [R] int64.

    vocab_ids: [V], the id of each column where that is not its index.
    """
    ids = sampling.positions.new_empty(0) if vocab_ids is None else vocab_ids
    return spec_sample(process(logits, sampling, constraints), sampling.greedy, sampling.seeds, sampling.positions, ids)


def process(logits: Tensor, sampling: SamplingTensors, constraints: LogitConstraints | None = None) -> Tensor:
    """Process logits [R, V] fp32 as each row asks, without its noise."""
    none, none_f = sampling.top_ks.new_empty(0), sampling.temperatures.new_empty(0)
    constraints = constraints or LogitConstraints(none, none, none_f, none, none_f, none)
    return process_logits(
        logits, sampling.positions,
        history=constraints.history, prompt_lens=constraints.prompt_lens, penalties=constraints.penalties,
        bias_ids=constraints.bias_ids, bias_values=constraints.bias_values,
        ban_ids=sampling.ban_ids, ban_until=sampling.ban_until, allow_mask=constraints.allow_mask,
        temperatures=sampling.temperatures, top_ks=sampling.top_ks, top_ps=sampling.top_ps, min_ps=sampling.min_ps,
    )  # fmt: skip


def draw_drafts(logits: Tensor, sampling: SamplingTensors, target_ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Sample from draft logits [R, Vd] fp32 as `draw` does; return the target's ids, [R] int64.

    target_ids: [Vd] int64, the target id of each column. draft_ids: [V], the draft id of each target id, -1 = none.
    """
    tokens = draw(logits, _banned_drafts(sampling, draft_ids), target_ids)
    return tokens.clamp(max=draft_ids.shape[0] - 1)  # if all draft ids are banned, any guess will do


def _banned_drafts(sampling: SamplingTensors, draft_ids: Tensor) -> SamplingTensors:
    """The same sampling, with banned ids of the draft vocabulary."""
    if not sampling.ban_ids.shape[1]:
        return sampling
    banned = sampling.ban_ids.long()
    return replace(sampling, ban_ids=torch.where(banned >= 0, draft_ids[banned.clamp(min=0)], -1).int())
