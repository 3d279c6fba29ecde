"""Interface of all draft heads: small models that read the target's hidden states and guess the next tokens.

At position p a head reads the token at p + 1 and a vector for position p. Its output there predicts the token at p + 2.
A head runs inside the target's graph (methods.worker) or next to the target (methods.head_drafter). Its code is the
same in both cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trtspec.core import KVSpec
from trtspec.models.attention import PagedAttend

GATE_UP = "gate and up of an MLP"
"""Name of these tensors in row_widths."""


class DraftHead(nn.Module, ABC):
    """A head over a vocabulary of Vd draft ids, each of which stands for one of the target's V ids.

    Passes are counted from 0. Pass 0 covers all rows of a step. Each further pass has one row per request and reads the
    head's previous output. The head itself decides which layers or matrices a pass uses.

    advance_draft_positions (vLLM's name): False = passes after the first do not advance by one position each. They all
    stay at the row where the first draft was made, with its position and KV length. reads_target_kv: the head has
    query-only layers over the target's KV (PagedAttend.query), and so runs in the target's graph only. reads_drafts:
    False = a pass has the same output whatever the drafts before it are.
    """

    advance_draft_positions: ClassVar[bool] = True
    reads_target_kv: ClassVar[bool] = False
    reads_drafts: ClassVar[bool] = True

    def __init__(self, vocab_size: int, draft_vocab_size: int | None = None, kv_layers: Sequence[KVSpec] = ()) -> None:
        """Create the vocabulary tables. kv_layers: the KV spec of each attention layer."""
        super().__init__()
        self.kv_layers = tuple(kv_layers)
        size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.register_buffer("target_ids", torch.arange(size), persistent=False)  # [Vd] target id of each draft id
        self.register_buffer("draft_ids", torch.arange(vocab_size), persistent=False)  # [V] the inverse, or -1
        self.target_ids: Tensor
        self.draft_ids: Tensor

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Set the target id of each draft id: target_ids [Vd] int64, distinct and in the target's vocabulary."""
        self.target_ids.copy_(target_ids)
        self.draft_ids.fill_(-1)
        self.draft_ids[target_ids] = torch.arange(len(target_ids))

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of the widest tensors that contain all rows, by name, where they count."""
        return {}

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding [V, Ht] and lm_head [V, Ht] where the head has none of its own."""

    def fuse(self, captured: Tensor) -> Tensor:
        """Return h [T, H] of the first pass.

        captured: [T, n * Ht], the target's states at the layers that the head asks for.
        """
        return captured

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run pass `step` and return its output y [T, W], which `logits` and `feedback` read.

        input_ids: [T], the token after each row. h: [T, H]. positions: [T]. rows: [R], the rows to return, [R, W];
        None = all. KV of all rows is appended.
        """

    @abstractmethod
    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the logits [R, Vd] fp32 over the draft vocabulary for the output y [R, W] of pass `step`."""

    def feedback(self, y: Tensor, step: int = 0) -> Tensor:
        """Return h [R, H] of the next pass for the output y [R, W] of pass `step`; y itself unless a head overrides it.

        vLLM's model_returns_tuple announces two states, one for the logits and one for the next pass. Here the second
        state follows from the first, and is computed only for the rows that a next pass reads.
        """
        return y

    @abstractmethod
    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the first `num_passes` passes read."""
