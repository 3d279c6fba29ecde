"""THE autoregressive draft loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs


@dataclass(frozen=True)
class ChainState:
    """Between two passes of a chain: the drafts just made, and where their own pass would run."""

    tokens: Tensor  # [B] int64
    attn: AttnMetadata  # one row per request: that of `tokens`, or, where positions stay, the last that is known
    sampling: SamplingTensors  # of B rows: how the token after `tokens` is drawn
    hidden: Tensor | None = None  # [B, H], or [B, rows, H]: what a head reads beside them


Forward = Callable[[int, ChainState], tuple[Tensor, Tensor | None]]
"""Pass number (1..K-1) and the state it starts from -> the next drafts [B] and their hidden states."""


def draft_chain(state: ChainState, num_tokens: int, forward: Forward, advance_positions: bool = True) -> Tensor:
    """K drafts per request, [B, K] int64: state.tokens, then one pass of one row per request for each further one.

    advance_positions False: all of these passes stand where state.attn says; only what is drawn moves on.
    """
    drafts = [state.tokens]
    for step in range(1, num_tokens):
        tokens, hidden = forward(step, state)
        attn = state.attn.advance() if advance_positions else state.attn
        state = ChainState(tokens, attn, state.sampling.advance(), hidden)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


Pass = Callable[[StepInputs], Tensor]
"""A model's rows -> the token drawn after each request's last one, [B]."""


def run_chain(run: Pass, inputs: StepInputs, num_tokens: int, first: Tensor | None = None) -> Tensor:
    """Drafts of a model, [B, K] int64: a pass over the rows of `inputs` draws the first ones, and a pass over each but
    the last of them the next. `first` [B]: what the first pass drew, if it was run already."""
    tokens = run(inputs) if first is None else first
    attn, sampling = inputs.attn.advance(), inputs.spec.sampling.advance()
    spec = SpecMetadata.plain(inputs.spec.request_ids, attn, sampling)

    def forward(step: int, state: ChainState) -> tuple[Tensor, None]:
        return run(StepInputs(state.tokens, state.attn, replace(spec, sampling=state.sampling))), None

    return draft_chain(ChainState(tokens, attn, sampling), num_tokens, forward)
