"""Training data of draft heads: windows of text, and the target's states of these windows."""

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
    """A window of S rows, from one or more texts, one after another.

    inputs [S] int64: ids. places [S] int64: position of each row in its text, from 0. taught [S] bool: whether a head
    is taught what follows the row.
    """

    inputs: Tensor
    places: Tensor
    taught: Tensor


class TrainingBatch(NamedTuple):
    """A batch of B windows of S rows, with what the target computes for them.

    inputs, places, taught [B, S]: as in Window. best [B, S] int64: the target's arg-max id after each row.
    captured [B, S, n * Ht]: its states at the layers that the head reads. last [B, S, Ht]: its states that its lm_head
    reads.
    """

    inputs: Tensor
    places: Tensor
    taught: Tensor
    best: Tensor
    captured: Tensor
    last: Tensor


LAST_STATE = (-1,)
"""Capture layers of a head that reads the same state as the target's lm_head: that after the target's last norm."""


class Windows(Protocol):
    """A sequence of windows, all of one length."""

    @property
    def seq_len(self) -> int:
        """Number of rows of a window, S."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Window: ...


@dataclass(frozen=True)
class TextWindows:
    """A sequence of windows cut from `tokens` [N], all of which is taught; the rest at the end is dropped."""

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> Window:
        ids = self.tokens[index * self.seq_len : (index + 1) * self.seq_len].astype(np.int64)
        return Window(torch.from_numpy(ids), torch.arange(self.seq_len), torch.ones(self.seq_len, dtype=torch.bool))


class TrainingBatches:
    """A source of batches of windows, with the target's states of them, which are computed unless `kept` has them.

    Every epoch has its own order, and covers every window once, except the rest that does not fill a batch. A batch
    depends on (seed, index) alone, so a resumed run gets the same batches as an uninterrupted one. ConfigError if the
    windows make no batch.
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
        """Return batch number `index` of the run, counted through all epochs."""
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
    """Number of the text, within its window, of each row: places [B, S] -> [B, S], from 0."""
    return F.pad((places[:, 1:] == 0).cumsum(1), (1, 0))


def taught_ahead(training_batch: TrainingBatch, steps: int) -> Tensor:
    """Mask [B, S] bool of the rows whose text and window have a taught row `steps` further on."""
    texts, size = texts_of(training_batch.places), training_batch.places.shape[1]
    within = torch.arange(size, device=texts.device) < size - steps
    return within & (texts.roll(-steps, dims=1) == texts) & training_batch.taught.roll(-steps, dims=1)


def observe(
    target: Decoder, capture_layers: Sequence[int], inputs: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the target; return its captured states [B, S, n * Ht] and last hidden states [B, S, Ht].

    inputs, places [B, S]: as in Window; places None = each window is one text.
    """
    batch, seq = inputs.shape
    if places is None:
        places = torch.arange(seq).expand(batch, -1)
    with torch.no_grad():
        attend = CausalAttend(batch, texts_of(places))
        hidden, captured = target.capture(inputs.reshape(-1), places.reshape(-1), attend, capture_layers)
    return captured.view(batch, seq, -1), hidden.view(batch, seq, -1)


@torch.no_grad()
def best_ids(target: Decoder, last: Tensor) -> Tensor:
    """Return the target's arg-max id after each row: last [B, S, Ht] -> [B, S] int64."""
    head, blocks = target.head, torch.split(last.flatten(0, 1), rows_of_logits(target.spec.vocab_size))
    # without the cast of `logits` to fp32, which keeps the order; and max is several times as fast as argmax
    plain = head.training and not head.is_packed
    logits = (F.linear(block, head.weight, head.bias) if plain else target.logits(block) for block in blocks)
    return torch.cat([block.max(-1).indices for block in logits]).view(last.shape[:2])


def frequent_tokens(tokens: Tokens, vocab_size: int, count: int) -> Tensor:
    """Return the `count` most frequent ids of `tokens`, ascending, [count] int64.

    Of equally frequent ids, the lower one is taken.
    """
    if not 0 < count <= vocab_size:
        raise ConfigError(f"draft_vocab_size={count}: the target's vocabulary has {vocab_size} ids; use 1 to that many")
    occurrences = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size)
    chosen = np.argsort(-occurrences, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen))
