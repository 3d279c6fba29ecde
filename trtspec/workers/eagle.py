"""EAGLE3 inside the target's graph: one head, run K times, that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.models.head_weights import describe_eagle3, load_eagle3
from trtspec.models.heads import Eagle3Head
from trtspec.models.layers import weight_bytes
from trtspec.workers.base import SpecWorkerBase, WorkerResources


class Eagle3OneModelWorker(SpecWorkerBase):
    """The hooks of an Eagle3Head; see models/heads.py."""

    def __init__(
        self, head: Eagle3Head, max_draft_len: int, capture_layers: Sequence[int], greedy: bool = False
    ) -> None:
        super().__init__(max_draft_len, capture_layers, head.spec.layer, greedy)
        self.head = head
        ids = head.target_ids
        self.register_buffer("_d2t", ids - torch.arange(len(ids), device=ids.device), persistent=False)
        self._d2t: Tensor

    @classmethod
    def from_resources(cls, resources: WorkerResources, target: Decoder) -> Eagle3OneModelWorker:
        """See base.BuildableWorker."""
        speculation, draft = resources.speculation, resources.draft
        assert draft is not None
        make = load_eagle3 if resources.reads_weights else describe_eagle3
        head = make(draft, target, len(speculation.capture_layers), resources.max_seq_len)
        greedy = speculation.draft_sample_method == "greedy"
        return cls(head, speculation.num_speculative_tokens, speculation.capture_layers, greedy)

    def first_pass(self, next_ids: Tensor, captured: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """See base."""
        return self.head(next_ids, self.head.fuse(captured), positions, attend)  # type: ignore[no-any-return]

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """See base."""
        return self.head(tokens, hidden, positions, attend)  # type: ignore[no-any-return]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See base."""
        return self.head.logits(hidden)

    @property
    def d2t(self) -> Tensor:
        return self._d2t

    @property
    def draft_ids(self) -> Tensor:
        return self.head.draft_ids

    @property
    def weight_bytes_per_step(self) -> int:
        """See base."""
        each = weight_bytes(self.head.midlayer, self.head.norm, self.head.head)
        return weight_bytes(self.head.fc) + self.max_draft_len * each
