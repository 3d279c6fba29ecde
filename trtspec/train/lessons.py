"""What a draft head learns from: windows of tokens, and the target's hidden states there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens, Windows
from trtspec.train.language_model import CausalAttend

Lesson = tuple[Tensor, Tensor, Tensor, Tensor]
"""ids [B, S], next ids [B, S], captured hidden states [B, S, n * Ht], the target's last hidden states [B, S, Ht]."""

LAST_STATE = (-1,)
"""The capture layers of a head that reads what the target's lm_head does: the state after its last norm."""


@dataclass(frozen=True)
class Lessons:
    """Windows of tokens, and what the target makes of them, computed when asked."""

    windows: Windows
    target: Decoder  # in training mode: its linears are torch's own
    capture_layers: tuple[int, ...]

    def batch(self, index: int) -> Lesson:
        """See Windows.batch."""
        inputs, following = self.windows.batch(index)
        return inputs, following, *observe(self.target, self.capture_layers, inputs)


def observe(target: Decoder, capture_layers: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """inputs [B, S] -> captured [B, S, n * Ht], last hidden states [B, S, Ht]."""
    batch, seq = inputs.shape
    with torch.no_grad():
        positions = torch.arange(seq, device=inputs.device).repeat(batch)
        hidden, captured = target.capture(inputs.reshape(-1), positions, CausalAttend(batch), capture_layers)
    return captured.view(batch, seq, -1), hidden.view(batch, seq, -1)


def frequent_tokens(tokens: Tokens, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent ids of `tokens`, ascending, [count] int64; rarer ties go to the lower id."""
    if not 0 < count <= vocab_size:
        raise ConfigError(f"draft_vocab_size={count}: the target's vocabulary has {vocab_size} ids; use 1 to that many")
    occurrences = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size)
    chosen = np.argsort(-occurrences, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen))
