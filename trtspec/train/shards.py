"""Training batches from files of hidden states (methods/hidden_states/shards.py).

The batches need no forward pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.methods.hidden_states.shards import SUFFIX, ShardReader, shards_of
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.training_batches import TrainingBatch, best_ids


def shard_files(data: Sequence[Path]) -> list[Path]:
    """Return the shards that `data` names as files or folders of them; [] if `data` is text or ids.

    ConfigError for a mixture.
    """
    found = {path: [path] if path.suffix == SUFFIX else shards_of(path) if path.is_dir() else [] for path in data}
    without = [path for path in data if not found[path]]
    if without and len(without) < len(data):
        raise ConfigError(
            f"data: {', '.join(map(str, without))} holds no shards of hidden states, the rest does; train on one kind"
        )
    return [file for path in data for file in found[path]]


def open_shards(files: Sequence[Path], hidden_size: int, vocab_size: int) -> list[ShardReader]:
    """Open the shards of `files`.

    Raises ConfigError if they differ from each other or from the target, CheckpointError for a damaged one.
    """
    readers = [ShardReader(file) for file in files]
    first = readers[0].metadata
    for file, reader in zip(files, readers, strict=True):
        if reader.metadata != first:
            raise ConfigError(f"data: {file} holds {reader.metadata}, {files[0]} holds {first}; train on one kind")
    if first.hidden_size != hidden_size:
        raise ConfigError(
            f"data: {files[0]} holds hidden states of size {first.hidden_size}, the target's are of {hidden_size}; "
            "use the target that made them"
        )
    highest = max((int(ids.max()) for ids in map(ShardReader.ids, readers) if len(ids)), default=0)
    if highest >= vocab_size:
        raise ConfigError(
            f"data: token id {highest} in shards for a vocabulary of {vocab_size}; use the target that made them"
        )
    return readers


def shard_tokens(shards: Sequence[ShardReader]) -> Tokens:
    """Return the tokens of all requests, one after another, [N] int64."""
    tokens: Tokens = torch.cat([shard.ids() for shard in shards]).numpy()
    return tokens


class ShardBatches:
    """A source of batches of windows over the requests of the shards, which are laid end to end.

    Every epoch has its own order and its own cuts. It covers all rows, except the rest that does not fill a batch. A
    request that a window cuts begins anew in the next window. A batch depends on (seed, index) alone.

    target: the model that made the states; batches have its dtype. ConfigError if the requests make no batch.
    """

    def __init__(
        self, shards: Sequence[ShardReader], seq_len: int, batch_size: int, seed: int, target: Decoder
    ) -> None:
        self.seq_len, self.batch_size, self.seed, self.target = seq_len, batch_size, seed, target
        self.dtype = target.norm.weight.dtype
        self.requests = [(shard, i) for shard in shards for i in range(len(shard.lengths))]
        self.lengths = np.array([length for shard in shards for length in shard.lengths], dtype=np.int64)
        self.num_rows = int(self.lengths.sum())
        self.num_windows = self.num_rows // seq_len
        if self.num_windows < batch_size:
            raise ConfigError(
                f"{len(self.requests)} requests in the shards make {self.num_windows} windows of seq_len={seq_len}, "
                f"less than batch_size={batch_size}; use more data, or lower one of them"
            )
        self._starts = np.cumsum(self.lengths) - self.lengths  # first row of each request, among all rows
        self._best = torch.full((self.num_rows,), -1, dtype=torch.int32)  # TrainingBatch.best by row; -1: not computed

    def batch(self, index: int) -> TrainingBatch:
        """Return batch number `index` of the run, counted through all epochs."""
        epoch, place = divmod(index, self.num_windows // self.batch_size)
        rng = np.random.default_rng([self.seed, self.seq_len, epoch])
        order = rng.permutation(len(self.requests))
        ends = np.cumsum(self.lengths[order])
        shift = int(rng.integers(self.num_rows % self.seq_len + 1))
        chosen = rng.permutation(self.num_windows)[place * self.batch_size : (place + 1) * self.batch_size]
        windows = [self._window(order, ends, shift + int(w) * self.seq_len) for w in chosen]
        inputs, captured, last, places, rows = (torch.stack(column) for column in zip(*windows, strict=True))
        missing = self._best[rows] < 0
        if missing.any():
            self._best[rows[missing]] = best_ids(self.target, last[missing][None])[0].int()
        best = self._best[rows].long()
        return TrainingBatch(inputs, places, torch.ones_like(inputs, dtype=torch.bool), best, captured, last)

    def _window(self, order: npt.NDArray[Any], ends: npt.NDArray[Any], start: int) -> tuple[Tensor, ...]:
        """Return the rows [start, start + S): their States, their places, and their indices among all rows.

        The rows are numbered through the requests in `order`. ends: end of each request in this numbering.
        """
        parts: list[tuple[Tensor, ...]] = []
        number, end = int(np.searchsorted(ends, start, side="right")), start + self.seq_len
        while start < end:
            request = int(order[number])
            shard, i = self.requests[request]
            begin = int(ends[number] - self.lengths[request])
            rows = torch.arange(start - begin, min(end, int(ends[number])) - begin)
            states = shard.rows(i, int(rows[0]), int(rows[-1]) + 1)
            hidden, last = states.hidden_states.to(self.dtype), states.last_hidden_state.to(self.dtype)
            parts.append((states.input_ids, hidden, last, rows - rows[0], rows + int(self._starts[request])))
            start, number = int(ends[number]), number + 1
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
