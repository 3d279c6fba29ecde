"""THE autoregressive draft loop: a draft model guesses K tokens, one forward pass each, for all requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, DraftRequest, Executable, Proposal, SamplingTensors, SpecMetadata, StepInputs
from trtspec.drafters.base import DraftResources


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
        K = max(request.max_draft_len for request in requests)
        drafts = torch.empty(len(requests), K, dtype=torch.int64)
        drafts[:, 0] = self._first_drafts(requests)
        if K > 1:
            # A request that wants fewer than K runs along: what it writes past its blocks lands in scratch.
            inputs = self._next_token_inputs(requests)
            for step in range(1, K):
                drafts[:, step] = self.model.run(replace(inputs, input_ids=drafts[:, step - 1])).tokens
                inputs = replace(
                    inputs,
                    attn=inputs.attn.advance(),
                    spec=replace(inputs.spec, sampling=inputs.spec.sampling.advance()),
                )
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

    def _next_token_inputs(self, requests: Sequence[DraftRequest]) -> StepInputs:
        """One row per request, one position past its known tokens."""
        return self._inputs(requests, [1] * len(requests), [len(request.tokens) + 1 for request in requests])

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
