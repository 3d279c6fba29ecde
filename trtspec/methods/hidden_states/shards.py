"""Files of hidden states that the target computed for whole requests, to train draft heads on.

A shard is one safetensors file `{prefix}-{index:05d}.safetensors` of some requests, numbered i from 0. For the L rows
of each request it has

    {i}.input_ids            [L] int64
    {i}.hidden_states        [L, n * H], the residual streams after the captured layers, side by side
    {i}.last_hidden_state    [L, H], after the last norm

The hidden states are in the target's dtype. The metadata, strings as in all safetensors files, is ShardMetadata, the
number of requests, and the format with its version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trtspec.errors import CheckpointError

FORMAT = "trtspec.hidden_states"
VERSION = "1"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"


class States(NamedTuple):
    """The tensors of one request, as the module describes them."""

    input_ids: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor


@dataclass(frozen=True)
class ShardMetadata:
    """The metadata that all shards of a folder share.

    capture_layers: "after layer i", -1 = after the last norm. hidden_size: H.
    """

    capture_layers: tuple[int, ...]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, shard: Path) -> tuple[ShardMetadata, int]:
        """Return the metadata of a shard and its number of requests.

        Raises CheckpointError if the file is no shard or is damaged.
        """
        try:
            with safe_open(shard, framework="pt") as file:
                found = file.metadata() or {}
                tensors = set(file.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{shard} cannot be read ({error}); delete it, or give another folder") from error
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{shard} holds no hidden states of {FORMAT}; give a folder of such shards")
        if found.get("version") != VERSION:
            raise CheckpointError(f"{shard} has version {found.get('version')} of its format; this is {VERSION}")
        try:
            layers = tuple(int(part) for part in found["capture_layers"].split(",") if part)
            metadata, count = cls(layers, int(found["hidden_size"]), found["dtype"]), int(found["requests"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{shard} has unusable metadata {found}; delete it") from error
        if tensors != {f"{i}.{name}" for i in range(count) for name in States._fields}:
            raise CheckpointError(f"{shard} does not hold the tensors of {count} requests; delete it")
        return metadata, count

    def as_metadata(self, requests: int) -> dict[str, str]:
        """Return the strings that `of` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "capture_layers": ",".join(map(str, self.capture_layers)),
            "hidden_size": str(self.hidden_size),
            "dtype": self.dtype,
            "requests": str(requests),
        }


def write_shard(path: Path, metadata: ShardMetadata, requests: Sequence[States]) -> None:
    """Write a shard whole or not at all: to a file next to `path`, flushed to disk, then renamed.

    Raises OSError; then nothing is left.
    """
    tensors = {
        f"{i}.{name}": tensor.contiguous()
        for i, states in enumerate(requests)
        for name, tensor in states._asdict().items()
    }
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        try:
            save_file(tensors, temporary, metadata.as_metadata(len(requests)))
        except SafetensorError as error:  # raised for a full disk
            raise OSError(str(error)) from error
        temporary.chmod(0o644)  # save_file makes its file private
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def shards_of(folder: Path) -> list[Path]:
    """Finished shards of a folder, sorted by name."""
    return sorted(folder.glob("*" + SUFFIX))


def shard_path(folder: Path, prefix: str, index: int) -> Path:
    """Path of shard `index`."""
    return folder / f"{prefix}-{index:05d}{SUFFIX}"


def next_index(folder: Path, prefix: str) -> int:
    """One more than the highest index of a finished shard of this prefix."""
    pattern = re.compile(re.escape(prefix) + r"-(\d{5,})" + re.escape(SUFFIX))
    matches = (pattern.fullmatch(path.name) for path in shards_of(folder))
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def leftovers(folder: Path, prefix: str) -> Iterable[Path]:
    """Temporary files of writers that were killed."""
    return folder.glob(f"{prefix}-*{SUFFIX}{TEMPORARY}")


class ShardReader:
    """A reader of one finished shard, which loads only the rows that are asked for."""

    def __init__(self, path: Path) -> None:
        """Open the shard at `path`. Raises the CheckpointError of ShardMetadata.of."""
        self.metadata, count = ShardMetadata.of(path)
        self._file = safe_open(path, framework="pt")
        self.lengths = [int(self._slice(i, "input_ids").get_shape()[0]) for i in range(count)]

    def rows(self, request: int, start: int, end: int) -> States:
        """Rows [start, end) of a request."""
        return States(*(self._slice(request, name)[start:end] for name in States._fields))

    def ids(self) -> Tensor:
        """Tokens of all requests of the shard, one after another, [sum of lengths] int64."""
        ids = [self._slice(i, "input_ids")[:] for i in range(len(self.lengths))]
        return torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)

    def _slice(self, request: int, name: str) -> Any:
        return self._file.get_slice(f"{request}.{name}")  # type: ignore[no-untyped-call]
