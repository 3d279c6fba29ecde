"""Parallel drafting inside the target's graph: all drafts from one pass of the draft layers.

A step gives a request v tokens: the prompt's, or what was accepted. The last one, n, is the next to be verified. Its
rows in the pass are those v tokens, then mask tokens, at consecutive positions, causal. The row of n guesses the token
after n, the mask behind it the one after that, and so on; K rows, K drafts, none of which has seen the others:

            tokens                                  positions of these         drafts are drawn at
    PARD    t_0, t_1 .. t_{v-1}, n, mask x (K-1)    p, p+1 .. p+v, ..          n and the K-1 masks
    P-EAGLE      t_1 .. t_{v-1}, n, mask x (K-1)    p    .. p+v-1, ..          the same

t_0, at position p, is the request's first row in the step. PARD (An et al., "PARD: accelerating LLM inference with
low-cost parallel draft model adaptation", arXiv 2504.18583; AMD-AGI/PARD) is a plain causal decoder that was trained to
do this. P-EAGLE is an EAGLE3 head, which reads with the token after each position the target's states of that position,
and for a mask a vector of its own, `mask_hidden`, in their place. These rows are those of vLLM's proposers (vllm/v1/
spec_decode, utils.py and llm_base_proposer.py); where they pad what was rejected with zeros, here are more masks.

KV of masks stands past what is committed, where the next step's tokens overwrite it: nothing has to be undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import AttnMetadata, SpecMetadata, StepInputs
from trtspec.methods.eagle3.head import Eagle3Head
from trtspec.methods.head import DraftHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend


class MaskWorker(SpecWorker, ABC):
    """Draft layers that guess at mask tokens, all drafts in one pass; which rows that has is for a subclass to say."""

    def __init__(
        self,
        head: DraftHead,
        max_draft_len: int,
        capture_layers: Sequence[int],
        greedy: bool = False,
        *,
        mask_token_id: int,
    ) -> None:
        super().__init__(head, max_draft_len, capture_layers, greedy)
        self.mask_token_id = mask_token_id

    @classmethod
    def settings(cls, speculation: SpeculationPlan) -> dict[str, Any]:
        """See base."""
        assert speculation.mask_token_id is not None
        return {"mask_token_id": speculation.mask_token_id}

    @abstractmethod
    def drafting_rows(self, hidden: Tensor, counts: Tensor, attn: AttnMetadata, spec: SpecMetadata) -> Tensor:
        """The rows of hidden [N, H], as `read_in` gave them, that drafts are drawn at, K' of each request in order,
        [B * K', H]."""

    def draft(
        self,
        hidden: Tensor,
        counts: Tensor,
        kv_lens: Tensor,
        attn: AttnMetadata,
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> tuple[Tensor, Tensor]:
        """All drafts at once, at the rows that `drafting_rows` gives. Shapes are SpecWorker.draft's."""
        if spec.next_draft_len == 0:
            return self.no_drafts(spec)
        drafts = self.draw_all(self.drafting_rows(hidden, counts, attn, spec), counts, spec)
        return drafts, self.draft_lens(drafts, hidden, spec)

    def draw_all(self, hidden: Tensor, counts: Tensor, spec: SpecMetadata) -> Tensor:
        """hidden [B * K', H], K' rows for each request -> its drafts [B, K'] int64; counts [B] tokens it was given."""
        K, B = spec.next_draft_len, spec.batch_size
        one = self.sampling_behind(counts, spec)  # [B]
        request = torch.arange(B, device=counts.device)[:, None].expand(B, K).flatten()  # [B * K']
        sampling = replace(one.select(request), positions=self.each(one.positions, K).flatten())
        return self.sample_drafts(0, hidden, sampling).view(B, K)

    @staticmethod
    def each(first: Tensor, number: int) -> Tensor:
        """first [B] int64 -> it and what follows, [B, number]."""
        return first[:, None] + torch.arange(number, device=first.device)

    @property
    def draft_rows(self) -> int:
        """See base."""
        return self.max_draft_len

    @property
    def weight_bytes_per_step(self) -> int:
        """See base; a single pass."""
        return self.head.weight_bytes_for(1)


class ParallelWorker(MaskWorker):
    """One pass over [tokens, masks]. `lead`: rows before the one that reads the token after a request's first row."""

    lead: ClassVar[int]

    @abstractmethod
    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """What the N rows are given of the target: captured [T, n * Ht], source [N] the step's row each belongs to,
        is_mask [N] bool -> [N, n * Ht]."""

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """See base; T + B * (lead + max(K', 1) - 1) rows. Without drafts to make, tokens are read in all the same."""
        attn, spec = inputs.attn, inputs.spec
        T, B = inputs.input_ids.shape[0], attn.batch_size
        more = self.lead + max(spec.next_draft_len, 1) - 1
        rows, N = attn.widen(more), T + B * more
        request = rows.requests(N)  # [N]
        first = attn.cu_q_lens[:-1].long()  # [B] row of the step
        last = attn.cu_q_lens[1:].long() - 1 - spec.draft_lens + (counts - 1).clamp(min=0)  # [B] the last that is kept
        # The row of the step whose next token each row reads; the one before the first is the lead.
        source = torch.arange(N, device=first.device) - more * request - self.lead  # [N]
        is_mask = source > last[request]
        after = self.prepare_context_input_ids(inputs.input_ids, accepted, attn, spec)  # [T]
        # One lookup for all kinds of rows, which AOTInductor compiles: several, one in the other, it does not.
        known = torch.cat((after, inputs.input_ids, after.new_full((1,), self.mask_token_id)))  # [2 T + 1]
        place = source.clamp(0, T - 1)
        if self.lead:
            place = torch.where(source < first[request], T + first[request], place)
        ids = known[torch.where(is_mask, 2 * T, place)]
        states = self.states(captured, source.clamp(0, T - 1), is_mask)
        return self.first_pass(ids, states, rows.positions(N), attend.at(rows)), rows

    def drafting_rows(self, hidden: Tensor, counts: Tensor, attn: AttnMetadata, spec: SpecMetadata) -> Tensor:
        """Those of each request's last token and of its masks."""
        K, taken = spec.next_draft_len, (counts - 1).clamp(min=0)
        first = attn.cu_q_lens[1:].long() - K - spec.draft_lens + taken  # [B] row of the last token, before the masks
        return hidden[self.each(first, K).flatten()]


class PardWorker(ParallelWorker):
    """A whole decoder (methods.draft_model.head), which reads tokens alone. Its KV at a position is of the token
    there."""

    lead = 1

    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """See ParallelWorker; there are none."""
        return captured


class PEagleWorker(ParallelWorker):
    """An EAGLE3 head with a `mask_hidden` (methods.eagle3.head)."""

    lead = 0
    head: Eagle3Head

    def states(self, captured: Tensor, source: Tensor, is_mask: Tensor) -> Tensor:
        """See ParallelWorker."""
        return torch.where(is_mask[:, None], self.head.mask_hidden, captured[source])
