"""Lessons from files of hidden states (methods/hidden_states/shards.py): the target's forward pass is done already."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.methods.hidden_states.shards import SUFFIX, ShardReader, shards_of
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.lessons import Lesson, best_ids

logger = logging.getLogger(__name__)


def shard_files(data: Sequence[Path]) -> list[Path]:
    """The shards that `data` names, files or folders of them; [] where it is text or ids. ConfigError for a mixture."""
    found = {path: [path] if path.suffix == SUFFIX else shards_of(path) if path.is_dir() else [] for path in data}
    without = [path for path in data if not found[path]]
    if without and len(without) < len(data):
        raise ConfigError(
            f"data: {', '.join(map(str, without))} holds no shards of hidden states, the rest does; train on one kind"
        )
    return [file for path in data for file in found[path]]


def open_shards(files: Sequence[Path], hidden_size: int, vocab_size: int) -> list[ShardReader]:
    """Raises ConfigError where they differ from each other or from the target, CheckpointError for a damaged one."""
    readers = [ShardReader(file) for file in files]
    first = readers[0].facts
    for file, reader in zip(files, readers, strict=True):
        if reader.facts != first:
            raise ConfigError(f"data: {file} holds {reader.facts}, {files[0]} holds {first}; train on one kind")
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
    """The tokens of all requests, one after another, [N] int64."""
    tokens: Tokens = torch.cat([shard.ids() for shard in shards]).numpy()
    return tokens


class ShardLessons:
    """Batches of windows within requests: every epoch sees all windows, ordered and cut anew.

    A request of L rows gives L // seq_len windows; shorter ones give none, and a warning says how many. A batch depends
    on (seed, index) alone. target: whose states they are, in whose dtype they are handed out.
    """

    def __init__(
        self, shards: Sequence[ShardReader], seq_len: int, batch_size: int, seed: int, target: Decoder
    ) -> None:
        self.seq_len, self.batch_size, self.seed, self.target = seq_len, batch_size, seed, target
        self.dtype = target.norm.weight.dtype
        everything = [(shard, i, length) for shard in shards for i, length in enumerate(shard.lengths)]
        self.requests = [request for request in everything if request[2] >= seq_len]
        self.num_dropped = len(everything) - len(self.requests)
        # (request, which of its windows)
        self.windows = [(r, w) for r, (_, _, length) in enumerate(self.requests) for w in range(length // seq_len)]
        if len(self.windows) < batch_size:
            raise ConfigError(
                f"{len(everything)} requests in the shards make {len(self.windows)} windows of seq_len={seq_len}, less "
                f"than batch_size={batch_size}; use more data, or lower one of them"
            )
        if self.num_dropped:
            logger.warning(
                "%d of %d requests are shorter than seq_len=%d and not used",
                self.num_dropped, len(everything), seq_len,
            )  # fmt: skip

    def batch(self, index: int) -> Lesson:
        """See trainer.Source."""
        epoch, place = divmod(index, len(self.windows) // self.batch_size)
        rng = np.random.default_rng([self.seed, self.seq_len, epoch])
        slack = [length % self.seq_len + 1 for _, _, length in self.requests]
        shifts = rng.integers(slack)
        order = rng.permutation(len(self.windows))
        chosen = [self.windows[i] for i in order[place * self.batch_size : (place + 1) * self.batch_size]]
        rows = [self._window(r, int(shifts[r]) + w * self.seq_len) for r, w in chosen]
        inputs, captured, last = (torch.stack(column) for column in zip(*rows, strict=True))
        places = torch.arange(self.seq_len).expand_as(inputs)
        return Lesson(
            inputs, places, torch.ones_like(inputs, dtype=torch.bool), best_ids(self.target, last), captured, last
        )

    def _window(self, request: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [start, start + S)."""
        shard, i, _ = self.requests[request]
        states = shard.rows(i, start, start + self.seq_len)
        return states.input_ids, states.hidden_states.to(self.dtype), states.last_hidden_state.to(self.dtype)
