"""THE autoregressive draft loop, and the drafter that runs a smaller model through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, DraftRequest, Executable, Proposal, SamplingTensors, SpecMetadata, StepInputs
from trtspec.drafters.base import DraftResources


@dataclass(frozen=True)
class ChainState:
    """Between two passes of a chain: the drafts just made, and where their own pass would run."""

    tokens: Tensor  # [B] int64
    attn: AttnMetadata  # one row per request: that of `tokens`
    sampling: SamplingTensors  # of B rows: how the token after `tokens` is drawn
    hidden: Tensor | None = None  # [B, H], what a head reads beside them


Forward = Callable[[int, ChainState], tuple[Tensor, Tensor | None]]
"""Pass number (1..K-1) and the state it starts from -> the next drafts [B] and their hidden states."""


def draft_chain(state: ChainState, num_tokens: int, forward: Forward) -> Tensor:
    """K drafts per request, [B, K] int64: state.tokens, then one pass of one row per request for each further one."""
    drafts = [state.tokens]
    for step in range(1, num_tokens):
        tokens, hidden = forward(step, state)
        state = ChainState(tokens, state.attn.advance(), state.sampling.advance(), hidden)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


class ChainDrafter:
    """Drafts with a smaller model of the same vocabulary whose KV lives under the target's block ids.

    The first pass covers all known tokens whose draft KV is missing: the whole prompt at first, later the last one or
    two tokens, or everything since speculation last ran. It draws the first draft; each further pass feeds the previous
    draft back. Draws use the request's own sampling and noise, so that target and draft agree as often as they can;
    `greedy` takes the arg-max instead.
    """

    def __init__(self, model: Executable, max_num_tokens: int, greedy: bool = False) -> None:
        self.model = model
        self.max_num_tokens = max_num_tokens
        self.greedy = greedy

    @classmethod
    def from_resources(cls, resources: DraftResources) -> ChainDrafter:
        """See base.BuildableDrafter."""
        greedy = resources.speculation.draft_sample_method == "greedy"
        return cls(resources.draft_model(), resources.max_num_tokens, greedy)

    def forget(self, request_id: int) -> None:
        """Nothing is kept outside the cache."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See core.Drafter."""
        # One row per request, one position past its known tokens. A request that wants fewer than K runs along: what
        # it writes past its blocks lands in scratch.
        inputs = self._inputs(requests, [1] * len(requests), [len(request.tokens) + 1 for request in requests])
        start = ChainState(self._first_drafts(requests), inputs.attn, inputs.spec.sampling)

        def forward(step: int, state: ChainState) -> tuple[Tensor, None]:
            spec = replace(inputs.spec, sampling=state.sampling)
            return self.model.run(StepInputs(state.tokens, state.attn, spec)).tokens, None

        drafts = draft_chain(start, max(request.max_draft_len for request in requests), forward)
        draft_lens = torch.tensor([request.max_draft_len for request in requests], dtype=torch.int32)
        known = torch.tensor([len(request.tokens) for request in requests], dtype=torch.int32)
        return Proposal(drafts, draft_lens, draft_kv_lens=known + draft_lens - 1)  # the last draft was never fed back

    def _first_drafts(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Bring every request's draft KV up to its last token and draw after it: [B] int64."""
        first = torch.empty(len(requests), dtype=torch.int64)
        for pieces in _pack(requests, self.max_num_tokens):
            owners = [requests[b] for b, _, _ in pieces]
            starts, ends = [start for _, start, _ in pieces], [end for _, _, end in pieces]
            ids = [
                token
                for request, start, end in zip(owners, starts, ends, strict=True)
                for token in request.tokens[start:end]
            ]
            q_lens = [end - start for start, end in zip(starts, ends, strict=True)]
            inputs = self._inputs(owners, q_lens, ends)
            # A piece that ends before its request does draws too, and is overwritten by the request's last piece.
            first[[b for b, _, _ in pieces]] = self.model.run(replace(inputs, input_ids=torch.tensor(ids))).tokens
        return first

    def _inputs(self, requests: Sequence[DraftRequest], q_lens: list[int], kv_lens: list[int]) -> StepInputs:
        """Rows up to kv_lens[b], drawing token kv_lens[b] of each request; input ids are left to the caller."""
        rows = [replace(r.sampling, greedy=True, temperature=0.0) if self.greedy else r.sampling for r in requests]
        attn = AttnMetadata.of(q_lens, kv_lens, [request.block_table for request in requests])
        spec = SpecMetadata.plain([r.request_id for r in requests], attn, SamplingTensors.of(rows, kv_lens))
        return StepInputs(torch.empty(0, dtype=torch.int64), attn, spec)


def _pack(requests: Sequence[DraftRequest], max_num_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """Rows [draft_kv_len, len(tokens)) of every request as (request, start, end), in launches of limited size."""
    pieces, room = [], max_num_tokens
    for b, request in enumerate(requests):
        start = request.draft_kv_len
        while start < len(request.tokens):
            end = min(len(request.tokens), start + room)
            pieces.append((b, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield pieces
                pieces, room = [], max_num_tokens
    if pieces:
        yield pieces
