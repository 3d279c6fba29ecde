"""The one autoregressive draft loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs


@dataclass(frozen=True)
class ChainState:
    """The state between two passes of a chain: the latest drafts, and the rows that their own pass would have."""

    tokens: Tensor  # [B] int64
    attn: AttnMetadata  # one row per request: that of `tokens`; where positions stay, the last known row
    sampling: SamplingTensors  # B rows: how to sample the token after `tokens`
    hidden: Tensor | None = None  # [B, H], or [B, rows, H]: states that a head reads together with `tokens`


Forward = Callable[[int, ChainState], tuple[Tensor, Tensor | None]]
"""(pass number 1..K-1, the state before that pass) -> (the next drafts [B], their hidden states)."""


def draft_chain(state: ChainState, num_tokens: int, forward: Forward, advance_positions: bool = True) -> Tensor:
    """Return K drafts per request, [B, K] int64: state.tokens, then one draft from each further pass.

    A pass has one row per request. num_tokens: K. advance_positions: False = all passes stay at the rows of state.attn,
    and only the sampling positions advance.
    """
    drafts = [state.tokens]
    for step in range(1, num_tokens):
        tokens, hidden = forward(step, state)
        attn = state.attn.advance() if advance_positions else state.attn
        state = ChainState(tokens, attn, state.sampling.advance(), hidden)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


Pass = Callable[[StepInputs], Tensor]
"""Rows of a model -> the token sampled after the last row of each request, [B]."""


def run_chain(run: Pass, inputs: StepInputs, num_tokens: int, first: Tensor | None = None) -> Tensor:
    """Return the drafts of a model, [B, K] int64.

    The first pass covers the rows of `inputs` and samples the first drafts. Each further pass feeds the previous drafts
    back; the last drafts are not fed back. num_tokens: K. first: [B], the result of the first pass if it has already
    run.
    """
    tokens = run(inputs) if first is None else first
    attn, sampling = inputs.attn.advance(), inputs.spec.sampling.advance()
    spec = SpecMetadata.plain(inputs.spec.request_ids, attn, sampling)

    def forward(step: int, state: ChainState) -> tuple[Tensor, None]:
        return run(StepInputs(state.tokens, state.attn, replace(spec, sampling=state.sampling))), None

    return draft_chain(ChainState(tokens, attn, sampling), num_tokens, forward)
