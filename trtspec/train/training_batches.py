"""What draft heads learn from: windows of text, and what the target makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.train.cross_entropy import rows_of_logits
from trtspec.train.data import Tokens
from trtspec.train.language_model import CausalAttend
from trtspec.train.states import KeptStates


class Window(NamedTuple):
    """S rows of one or more texts, one after another. inputs [S] int64; places [S] int64: of each in its text, from 0;
    taught [S] bool: whether what follows the row is something to learn."""

    inputs: Tensor
    places: Tensor
    taught: Tensor


class TrainingBatch(NamedTuple):
    """B windows of S rows. best [B, S] int64: the id that the target would say after each row; captured [B, S, n * Ht]:
    its states at the layers that the head reads; last [B, S, Ht]: those that its lm_head reads."""

    inputs: Tensor
    places: Tensor
    taught: Tensor
    best: Tensor
    captured: Tensor
    last: Tensor


LAST_STATE = (-1,)
"""The capture layers of a head that reads what the target's lm_head does: the state after its last norm."""


class Windows(Protocol):
    """Windows by number, all of one length."""

    @property
    def seq_len(self) -> int:
        """S."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Window: ...


@dataclass(frozen=True)
class TextWindows:
    """`tokens` [N] cut into windows, all of which is to learn; what is left at the end is dropped."""

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> Window:
        ids = self.tokens[index * self.seq_len : (index + 1) * self.seq_len].astype(np.int64)
        return Window(torch.from_numpy(ids), torch.arange(self.seq_len), torch.ones(self.seq_len, dtype=torch.bool))


class TrainingBatches:
    """Batches of windows, and what the target makes of them: computed when asked, or read where `kept` has it.

    Every epoch sees every window once, but for what is left of a batch, in an order of its own. A batch depends on
    (seed, index) alone, so a resumed run sees what an uninterrupted one would have seen. ConfigError where the windows
    make no batch.
    """

    def __init__(
        self,
        windows: Windows,
        target: Decoder,
        capture_layers: Sequence[int],
        batch_size: int,
        seed: int,
        kept: KeptStates | None = None,
    ) -> None:
        if len(windows) < batch_size:
            raise ConfigError(
                f"data: {len(windows)} windows of seq_len={windows.seq_len} make no batch_size={batch_size}; use more "
                "data, or lower one of them"
            )
        self.windows, self.target, self.capture_layers = windows, target, tuple(capture_layers)
        self.batch_size, self.seed, self.kept = batch_size, seed, kept

    def batch(self, index: int) -> TrainingBatch:
        """TrainingBatch number `index` of the run, counted through all epochs (see trainer.Source)."""
        epoch, place = divmod(index, len(self.windows) // self.batch_size)
        order = np.random.default_rng([self.seed, self.windows.seq_len, epoch]).permutation(len(self.windows))
        chosen = [int(i) for i in order[place * self.batch_size : (place + 1) * self.batch_size]]
        windows = Window(*(torch.stack(column) for column in zip(*map(self.windows.__getitem__, chosen), strict=True)))
        return TrainingBatch(*windows, *self._observed(chosen, windows))

    def _observed(self, chosen: Sequence[int], windows: Window) -> tuple[Tensor, Tensor, Tensor]:
        found = [None if self.kept is None else self.kept.get(i) for i in chosen]
        missing = [row for row, states in enumerate(found) if states is None]
        if missing:
            some = Window(*(column[missing] for column in windows))
            captured, last = observe(self.target, self.capture_layers, some.inputs, some.places)
            best = best_ids(self.target, last)
            for i, row in enumerate(missing):
                found[row] = states = (best[i], captured[i], last[i])
                if self.kept is not None:
                    self.kept.put(chosen[row], states)
        best, captured, last = (torch.stack(column) for column in zip(*(one for one in found if one), strict=True))
        return best, captured, last


def texts_of(places: Tensor) -> Tensor:
    """places [B, S] -> which text of its window a row belongs to, [B, S] from 0."""
    return F.pad((places[:, 1:] == 0).cumsum(1), (1, 0))


def taught_ahead(training_batch: TrainingBatch, steps: int) -> Tensor:
    """[B, S] bool: rows whose text and window have a row `steps` further on, which is taught."""
    texts, size = texts_of(training_batch.places), training_batch.places.shape[1]
    within = torch.arange(size, device=texts.device) < size - steps
    return within & (texts.roll(-steps, dims=1) == texts) & training_batch.taught.roll(-steps, dims=1)


def observe(
    target: Decoder, capture_layers: Sequence[int], inputs: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """inputs, places [B, S] (see Window; None = one text each) -> captured [B, S, n * Ht], last hidden states
    [B, S, Ht]."""
    batch, seq = inputs.shape
    if places is None:
        places = torch.arange(seq).expand(batch, -1)
    with torch.no_grad():
        attend = CausalAttend(batch, texts_of(places))
        hidden, captured = target.capture(inputs.reshape(-1), places.reshape(-1), attend, capture_layers)
    return captured.view(batch, seq, -1), hidden.view(batch, seq, -1)


@torch.no_grad()
def best_ids(target: Decoder, last: Tensor) -> Tensor:
    """last [B, S, Ht] -> the id that the target would say after each row, [B, S] int64."""
    head, blocks = target.head, torch.split(last.flatten(0, 1), rows_of_logits(target.spec.vocab_size))
    # without what `logits` makes of bf16, which orders alike; and argmax takes several times as long as max
    plain = head.training and not head.is_packed
    logits = (F.linear(block, head.weight, head.bias) if plain else target.logits(block) for block in blocks)
    return torch.cat([block.max(-1).indices for block in logits]).view(last.shape[:2])


def frequent_tokens(tokens: Tokens, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent ids of `tokens`, ascending, [count] int64; rarer ties go to the lower id."""
    if not 0 < count <= vocab_size:
        raise ConfigError(f"draft_vocab_size={count}: the target's vocabulary has {vocab_size} ids; use 1 to that many")
    occurrences = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size)
    chosen = np.argsort(-occurrences, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen))
