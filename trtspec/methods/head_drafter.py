"""Draft layers next to the target as an engine of their own: EAGLE3, EAGLE and MTP, and a draft model's trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan, scheduled_draft_lens
from trtspec.core import AttnMetadata, Proposal, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.drafter import DraftModel
from trtspec.methods.rows import Piece, pack_rows
from trtspec.protocols import DraftRequest, Executable


class HeadDrafter:
    """A drafter whose layers make all drafts in one launch; their KV lives under the target's block ids.

    They read the target's hidden states, and so the token after each row; or they are a whole model that reads tokens
    alone.

    Each step is one launch: a pass over the rows that the target has accepted since the last launch, then the chain.
    The draft KV of a chain was computed from the layers' own guesses, and that of a tree is not in line. So the rows of
    accepted drafts are computed again.
    """

    def __init__(
        self, head: Executable, max_num_tokens: int, draft_lens: Sequence[int] = (), reads_states: bool = True
    ) -> None:
        self.head = head
        self.max_num_tokens = max_num_tokens
        self.draft_lens = draft_lens  # ascending numbers of drafts that `head` can make; empty: any
        self.reads_states = reads_states

    @classmethod
    def of(cls, speculation: SpeculationPlan, model: DraftModel | None, max_num_tokens: int) -> HeadDrafter:
        """Build the drafter from the loaded head."""
        assert model is not None
        lengths = model.draft_lens
        if speculation.dynamic_tree is not None and not lengths:  # how deep a tree grows follows from its number
            lengths = tuple(sorted(scheduled_draft_lens(speculation)))
        return cls(model.executable, max_num_tokens, lengths, speculation.mode.reads_hidden_states())

    def forget(self, request_id: int) -> None:
        """Do nothing: no state is kept outside the KV cache."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Propose drafts for each request; every request needs its hidden_states, if the layers read any.

        protocols.Drafter explains the contract.
        """
        wanted = [request.max_draft_len for request in requests]
        starts = [request.draft_kv_len for request in requests]
        if self.reads_states:
            ends = [start + len(_states(request)) for start, request in zip(starts, requests, strict=True)]
        else:
            ends = [len(request.tokens) for request in requests]
        # A request that wants fewer than K drafts makes K too: KV that it writes past its blocks lands in scratch.
        K = max(wanted)
        drafts, parents = torch.zeros(2, len(requests), K, dtype=torch.int64)
        lens = torch.zeros(len(requests), dtype=torch.int32)  # number of drafts worth verifying
        scores = None
        for pieces in pack_rows(starts, ends, self.max_num_tokens):
            length = self._length(K) if any(end == ends[b] for b, _, end in pieces) else 0
            made = self.head.run(self._inputs(requests, pieces, length)).proposal
            assert made is not None
            if length:  # a piece that ends before its request drafts too; the last piece overwrites its drafts
                owners = [b for b, _, _ in pieces]
                drafts[owners], lens[owners] = made.draft_tokens[:, :K], made.draft_lens
                if made.draft_parents is not None:
                    parents[owners] = made.draft_parents[:, :K]
                if made.draft_scores is not None:
                    scores = torch.zeros(drafts.shape) if scores is None else scores
                    scores[owners] = made.draft_scores[:, :K]
        lens = lens.minimum(torch.tensor(wanted, dtype=torch.int32))
        shapes = None if requests[0].max_depth is None else parents
        return Proposal(drafts, lens, None, torch.tensor(ends, dtype=torch.int32), shapes, scores)

    def _length(self, K: int) -> int:
        """Return the length of the shortest available chain that makes K drafts."""
        return next((length for length in self.draft_lens if length >= K), K)

    def _inputs(self, requests: Sequence[DraftRequest], pieces: Sequence[Piece], length: int) -> StepInputs:
        """Return the inputs of a launch over rows [start, end) of each piece's request, which makes `length` drafts.

        If the layers read states, the token at index `end` of the request is known.
        """
        ahead = int(self.reads_states)  # of a row, the token that it reads
        owners = [requests[b] for b, _, _ in pieces]
        q_lens, kv_lens = [end - start for _, start, end in pieces], [end for _, _, end in pieces]
        ids = [token for b, start, end in pieces for token in requests[b].tokens[start + ahead : end + ahead]]
        states = None
        if self.reads_states:
            each = zip(owners, pieces, strict=True)
            states = torch.cat(
                [_states(one)[start - one.draft_kv_len : end - one.draft_kv_len] for one, (_, start, end) in each]
            )
        attn = AttnMetadata.of(q_lens, kv_lens, [request.block_table for request in owners])
        known = [end - 1 + ahead for end in kv_lens]  # position of the last known token
        sampling = SamplingTensors.of([request.sampling for request in owners], known)
        spec = SpecMetadata.plain([request.request_id for request in owners], attn, sampling, length)
        return StepInputs(torch.tensor(ids), attn, spec, states)


def _states(request: DraftRequest) -> Tensor:
    assert request.hidden_states is not None
    return request.hidden_states
