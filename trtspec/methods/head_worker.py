"""A draft head inside the target's graph, or by itself: EAGLE3 and its kin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from trtspec.methods.head import DraftHead
from trtspec.methods.worker import SpecWorkerBase, WorkerResources
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder


class HeadWorker(SpecWorkerBase):
    """The hooks of a DraftHead; see methods/head.py."""

    def __init__(
        self, head: DraftHead, max_draft_len: int, capture_layers: Sequence[int], greedy: bool = False
    ) -> None:
        super().__init__(max_draft_len, capture_layers, greedy)
        self.head = head
        self.advance_draft_positions = head.advance_draft_positions
        self.reads_target_kv = head.reads_target_kv
        ids = head.target_ids
        self.register_buffer("_d2t", ids - torch.arange(len(ids), device=ids.device), persistent=False)
        self._d2t: Tensor

    @classmethod
    def from_resources(cls, resources: WorkerResources, target: Decoder) -> Self:
        """See base.BuildableWorker."""
        speculation = resources.speculation
        greedy = speculation.draft_sample_method == "greedy"
        K = speculation.num_speculative_tokens
        return cls(resources.load_head(target), K, speculation.capture_layers, greedy)

    def first_pass(self, next_ids: Tensor, captured: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """See base."""
        return self.head(next_ids, self.head.fuse(captured), positions, attend)  # type: ignore[no-any-return]

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """See base."""
        return self.head(tokens, self.head.feedback(hidden, step - 1), positions, attend, step)  # type: ignore[no-any-return]

    def draft_logits(self, step: int, hidden: Tensor) -> Tensor:
        """See base."""
        return self.head.logits(hidden, step)

    @property
    def d2t(self) -> Tensor:
        return self._d2t

    @property
    def draft_ids(self) -> Tensor:
        return self.head.draft_ids

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """See base."""
        return self.head.kv_shapes

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See base."""
        return self.head.windows

    @property
    def weight_bytes_per_step(self) -> int:
        """See base."""
        return self.head.weight_bytes_for(self.max_draft_len)
