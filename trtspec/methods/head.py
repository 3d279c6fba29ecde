"""What all draft heads have in common: small models that read the target's hidden states and guess the next tokens.

At position p a head is given the token at p + 1 and a vector for position p, and what it puts out there predicts the
token at p + 2. It runs inside the target's graph (methods.worker) or beside it (methods.head_drafter);
neither knows which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trtspec.core import KVSpec
from trtspec.models.attention import PagedAttend


class DraftHead(nn.Module, ABC):
    """A head over a vocabulary of Vd draft ids, each of which stands for one of the target's V.

    Passes are counted from 0: the first covers all rows of a step, each further one a row per request and reads what
    the head put out before. Which layers or matrices a pass uses is for the head to say.

    advance_draft_positions (the name is vLLM's): False = passes after the first do not stand one position further each,
    but all at the row where the first draft was made, with its position and length of KV. reads_target_kv: it has
    layers of queries alone, over KV of the target's (PagedAttend.query), and so runs in the target's graph only.
    """

    advance_draft_positions: ClassVar[bool] = True
    reads_target_kv: ClassVar[bool] = False

    def __init__(self, vocab_size: int, draft_vocab_size: int | None = None, kv_layers: Sequence[KVSpec] = ()) -> None:
        """kv_layers: of each of its attention layers."""
        super().__init__()
        self.kv_layers = tuple(kv_layers)
        size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.register_buffer("target_ids", torch.arange(size), persistent=False)  # [Vd] target id of each draft id
        self.register_buffer("draft_ids", torch.arange(vocab_size), persistent=False)  # [V] the way back, or -1
        self.target_ids: Tensor
        self.draft_ids: Tensor

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """target_ids [Vd] int64, distinct and in the target's vocabulary: what each draft id stands for."""
        self.target_ids.copy_(target_ids)
        self.draft_ids.fill_(-1)
        self.draft_ids[target_ids] = torch.arange(len(target_ids))

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding [V, Ht] and lm_head [V, Ht] in the place of those that the head has not."""

    def fuse(self, captured: Tensor) -> Tensor:
        """captured [T, n * Ht], the target's states at the layers the head asks for -> h [T, H] of the first pass."""
        return captured

    @abstractmethod
    def forward(self, input_ids: Tensor, h: Tensor, positions: Tensor, attend: PagedAttend, step: int = 0) -> Tensor:
        """Pass `step`: the token after each row [T], h [T, H], positions [T] -> y [T, W], see logits and feedback."""

    @abstractmethod
    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """y [R, W] of pass `step` -> logits [R, Vd] fp32 over the draft vocabulary."""

    def feedback(self, y: Tensor, step: int = 0) -> Tensor:
        """y [R, W] of pass `step` -> h [R, H] of the pass after it; the same, unless a head says otherwise.

        What vLLM's model_returns_tuple says, a state for the logits and another for the next pass: here the second
        follows from the first, and is computed of the rows that a next pass reads.
        """
        return y

    @abstractmethod
    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the first `num_passes` passes read."""
