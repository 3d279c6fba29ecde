"""DSpark inside the target's graph; methods/dspark/head.py explains what the head computes.

The block is that of DFlash, at the same positions. Its rows see each other, so with fewer rows the output of each would
differ. Therefore the block has the rows of max_draft_len drafts, as in vLLM, whatever the batch asks for. A batch with
K' < max_draft_len takes the first K' of the same drafts. DeepSpec runs block_size rows and cuts the block, which is the
same at K = block_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, Proposal, SpecMetadata, StepInputs
from trtspec.methods.dflash.worker import DFlashWorker
from trtspec.methods.dspark.head import DSparkHead
from trtspec.models.attention import PagedAttend
from trtspec.models.layers import weight_bytes


class DSparkWorker(DFlashWorker):
    """A worker that runs one pass over the block, and then draws the drafts from left to right.

    The output of the pass, `hidden` [B * width, H + R], is h of each row and e of the first token of the row's block.
    The confidence head judges the drafts, where there is a threshold, or where drafts have scores.
    """

    head: DSparkHead

    def __init__(
        self,
        head: DSparkHead,
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
            mask_token_id=mask_token_id,
            confidence_threshold=confidence_threshold,
            gives_scores=gives_scores,
        )
        self.lead = 0 if head.spec.from_anchor else 1  # number of rows before that of the first draft

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Append the text's KV and run the blocks -> hidden [B * width, H + R], and the blocks' rows."""
        c = self.read_text(inputs, captured, attend)
        if inputs.spec.next_draft_len == 0:
            return c, inputs.attn
        last = self.last_tokens(accepted, counts)  # [B]
        h, block = self.block(inputs, last, counts, self.max_draft_len + self.lead, attend)  # [B, width, H]
        first = self.head.before(last, h)[:, None].expand(-1, h.shape[1], -1)
        return torch.cat((h, first), dim=-1).flatten(0, 1), block

    def draft(
        self,
        hidden: Tensor,
        counts: Tensor,
        kv_lens: Tensor,
        attn: AttnMetadata,
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> Proposal:
        """Draw each draft from its row and the draft before it. Shapes are those of SpecWorker.draft."""
        K, head = spec.next_draft_len, self.head
        if K == 0:
            return self.no_drafts(spec)
        h, e = self._rows(hidden, spec)
        state = torch.zeros_like(e)
        if self.lead:
            state = head.advanced(h[:, 0], e, state)
        h = h[:, self.lead : self.lead + K]
        base = self.draft_logits(0, h.flatten(0, 1)).view(spec.batch_size, K, -1)  # [B, K', Vd]
        sampling, drafts = self.draft_sampling(counts, spec), []
        probs: list[Tensor] | None = [] if self.gives_scores and not head.spec.confidence else None
        for k in range(K):
            logits, state = head.biased(base[:, k], h[:, k], e, state)
            drafts.append(self.draw_from(logits, sampling, probs))
            sampling, e = sampling.advance(), head.before(drafts[k], h)
        chosen = torch.stack(drafts, dim=1)
        scores = None if probs is None else torch.stack(probs, dim=1)
        if self.gives_scores and head.spec.confidence:
            scores = self.confidences(chosen, hidden, spec)
        return Proposal(chosen, self.draft_lens(chosen, hidden, spec), draft_scores=scores)

    def draft_lens(self, drafts: Tensor, hidden: Tensor, spec: SpecMetadata) -> Tensor:
        """Number of drafts before the first whose confidence is below the threshold, [B] int32."""
        if self.confidence_threshold is None:
            return super().draft_lens(drafts, hidden, spec)
        doubted = self.confidences(drafts, hidden, spec) < self.confidence_threshold
        return (doubted.int().cumsum(1) == 0).sum(1).int()

    def confidences(self, drafts: Tensor, hidden: Tensor, spec: SpecMetadata) -> Tensor:
        """Confidence of each of drafts [B, K'] int64, given the drafts before it: [B, K'] fp32 in (0, 1)."""
        K = drafts.shape[1]
        h, first = self._rows(hidden, spec)
        h = h[:, self.lead : self.lead + K].flatten(0, 1)
        later = self.head.before(drafts[:, :-1].flatten(), h).view(spec.batch_size, K - 1, first.shape[1])
        e = torch.cat((first[:, None], later), dim=1).flatten(0, 1)
        return self.head.confidences(h, e).view(-1, K)

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one step reads.

        Each draft also reads the Markov head, of which the few rows of W1 do not count.
        """
        markov = self.head.markov
        each = weight_bytes(*(part for name, part in markov.items() if name != "embedding"))
        first = weight_bytes(markov["joint"]) if self.lead and "joint" in markov else 0  # for the row without a draft
        judges = self.confidence_threshold is not None or (self.gives_scores and self.head.spec.confidence)
        judged = weight_bytes(self.head.confidence) if judges else 0
        return super().weight_bytes_per_step + self.max_draft_len * each + first + judged

    def _rows(self, hidden: Tensor, spec: SpecMetadata) -> tuple[Tensor, Tensor]:
        """Split the `hidden` of `read_in` into h [B, width, H] and e [B, R] of the first token."""
        R = self.head.spec.rank
        rows = hidden.view(spec.batch_size, -1, hidden.shape[-1])
        return rows[..., : rows.shape[-1] - R], rows[:, 0, rows.shape[-1] - R :]
