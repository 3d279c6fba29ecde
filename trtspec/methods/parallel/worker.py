"""Parallel drafting inside the target's graph: all drafts from one pass of the draft layers.

A step gives a request v tokens: those of the prompt, or those accepted. The last one, n, is the next to be verified.
The request's rows in the pass are those v tokens, then mask tokens, at consecutive positions, with causal attention.
The row of n guesses the token after n, the first mask guesses the token after that, and so on. K rows make K drafts,
none of which depends on the others:

            tokens                                  positions of these         drafts are drawn at
    PARD    t_0, t_1 .. t_{v-1}, n, mask x (K-1)    p, p+1 .. p+v, ..          n and the K-1 masks
    P-EAGLE      t_1 .. t_{v-1}, n, mask x (K-1)    p    .. p+v-1, ..          the same

t_0, at position p, is the request's first row in the step. PARD (An et al., "PARD: accelerating LLM inference with
low-cost parallel draft model adaptation", arXiv 2504.18583; AMD-AGI/PARD) is a plain causal decoder that was trained to
do this. P-EAGLE is an EAGLE3 head. It reads the token after each position together with the target's states of that
position. For a mask it reads a vector of its own, `mask_hidden`, in place of the states.

The rows are those of vLLM's proposers (vllm/v1/spec_decode, utils.py and llm_base_proposer.py). Where vLLM pads
rejected rows with zeros, there are more masks here.

KV of masks lies after the committed tokens. The next step's tokens overwrite it there, so nothing has to be undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import AttnMetadata, Proposal, SpecMetadata, StepInputs
from trtspec.methods.eagle3.head import Eagle3Head
from trtspec.methods.head import DraftHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend


class MaskWorker(SpecWorker, ABC):
    """A worker whose draft layers guess at mask tokens, all drafts in one pass. A subclass defines the pass's rows."""

    def __init__(
        self,
        head: DraftHead,
        max_draft_len: int,
        capture_layers: Sequence[int],
        greedy: bool = False,
        *,
        mask_token_id: int,
        confidence_threshold: float | None = None,
        gives_scores: bool = False,
    ) -> None:
        super().__init__(
            head,
            max_draft_len,
            capture_layers,
            greedy,
            confidence_threshold=confidence_threshold,
            gives_scores=gives_scores,
        )
        self.mask_token_id = mask_token_id

    @classmethod
    def settings(cls, speculation: SpeculationPlan) -> dict[str, Any]:
        """Return the keyword arguments of SpecWorker, and the id of the mask token."""
        assert speculation.mask_token_id is not None
        return {**super().settings(speculation), "mask_token_id": speculation.mask_token_id}

    @abstractmethod
    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Run the pass; return the output that `draft` draws from, and all rows of the pass."""

    def draft(
        self,
        hidden: Tensor,
        counts: Tensor,
        kv_lens: Tensor,
        attn: AttnMetadata,
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> Proposal:
        """Draw all drafts at once. hidden: [B * K', H] of `read_in`; other shapes are those of SpecWorker.draft."""
        if spec.next_draft_len == 0:
            return self.no_drafts(spec)
        probs = self.new_probs()
        drafts = self.draw_all(hidden, counts, spec, probs)
        by_pass = None if probs is None else probs[0].view_as(drafts).unbind(1)
        return self.proposal(drafts, self.draft_lens(drafts, hidden, spec), by_pass)

    def draw_all(self, hidden: Tensor, counts: Tensor, spec: SpecMetadata, probs: list[Tensor] | None) -> Tensor:
        """Return drafts [B, K'] int64, and append their probabilities [B * K'] to `probs`.

        hidden: [B * K', H], K' rows of each request. counts: [B], number of tokens that each request was given.
        """
        K, B = spec.next_draft_len, spec.batch_size
        one = self.draft_sampling(counts, spec)  # [B]
        request = torch.arange(B, device=counts.device)[:, None].expand(B, K).flatten()  # [B * K']
        sampling = replace(one.select(request), positions=self.each(one.positions, K).flatten())
        return self.sample_drafts(0, hidden, sampling, probs).view(B, K)

    @staticmethod
    def each(first: Tensor, number: int) -> Tensor:
        """Return first [B] int64 and the integers after it, [B, number]."""
        return first[:, None] + torch.arange(number, device=first.device)

    @property
    def draft_rows(self) -> int:
        """Number of rows of draft logits that a pass makes for each request."""
        return self.max_draft_len

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one step reads, in a single pass."""
        return self.head.weight_bytes_for(1)


class ParallelWorker(MaskWorker):
    """A worker whose one pass runs over [tokens, masks].

    lead: number of rows before the one that reads the token after a request's first row.
    """

    lead: ClassVar[int]

    @abstractmethod
    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """Return the target's states that the N rows read, [N, n * Ht].

        captured: [T, n * Ht]. source: [N], the step's row that each row belongs to. is_mask: [N] bool.
        """

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Run the pass over T + B * (lead + max(K', 1) - 1) rows.

        Returned are its output at the `drafting_rows`, and all these rows. With K' = 0 the pass still appends the
        tokens' KV.
        """
        attn, spec = inputs.attn, inputs.spec
        T, B = inputs.input_ids.shape[0], attn.batch_size
        more = self.lead + max(spec.next_draft_len, 1) - 1
        rows, N = attn.widen(more), T + B * more
        request = rows.requests(N)  # [N]
        first = attn.cu_q_lens[:-1].long()  # [B] first row of each request in the step
        last = attn.cu_q_lens[1:].long() - 1 - spec.draft_lens + (counts - 1).clamp(min=0)  # [B] last row that is kept
        # Row of the step whose next token each row reads; one before the request's first row marks the lead.
        source = torch.arange(N, device=first.device) - more * request - self.lead  # [N]
        is_mask = source > last[request]
        after = self.prepare_context_input_ids(inputs.input_ids, accepted, attn, spec)  # [T]
        # One lookup for all kinds of rows: AOTInductor compiles it, but not several nested lookups.
        known = torch.cat((after, inputs.input_ids, after.new_full((1,), self.mask_token_id)))  # [2 T + 1]
        place = source.clamp(0, T - 1)
        if self.lead:
            place = torch.where(source < first[request], T + first[request], place)
        ids = known[torch.where(is_mask, 2 * T, place)]
        states = self.states(captured, source.clamp(0, T - 1), is_mask)
        drafting = self.drafting_rows(counts, rows, spec)
        return self.first_pass(ids, states, rows.positions(N), attend.at(rows), drafting), rows

    def drafting_rows(self, counts: Tensor, attn: AttnMetadata, spec: SpecMetadata) -> Tensor:
        """Return the rows of each request's last token and of its masks, [B * max(K', 1)] int64."""
        K, taken = max(spec.next_draft_len, 1), (counts - 1).clamp(min=0)
        first = attn.cu_q_lens[1:].long() - K - spec.draft_lens + taken  # [B] row of the last token, before the masks
        return self.each(first, K).flatten()


class PardWorker(ParallelWorker):
    """A worker for a whole decoder (methods.draft_model.head), which reads only tokens.

    The decoder's KV at a position is of the token at that position.
    """

    lead = 1

    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """Return `captured` as it is: the decoder reads no states."""
        return captured


class PEagleWorker(ParallelWorker):
    """A worker for an EAGLE3 head with a `mask_hidden` (methods.eagle3.head)."""

    lead = 0
    head: Eagle3Head

    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """Return the captured states of each row, and `mask_hidden` for masks, [N, n * Ht]."""
        return torch.where(is_mask[:, None], self.head.mask_hidden, captured[source])
