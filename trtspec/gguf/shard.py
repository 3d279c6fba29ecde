"""The tensors of a GGUF file under their Hugging Face names, read one at a time like those of safetensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtspec.errors import CheckpointError, DependencyError
from trtspec.gguf.file import GgufFile, TensorEntry
from trtspec.gguf.metadata import MetadataReader
from trtspec.gguf.names import KEPT_BITS, ROPE_FACTORS, hf_name, kept_linears, turned_heads

_AT_ONCE = 16 << 20  # elements to dequantise at a time
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GgufShard:
    """An open GGUF file, with safetensors' methods `keys`, `get_slice` and `get_tensor`."""

    file: GgufFile
    slices: Mapping[str, GgufSlice | PackedSlice]  # by Hugging Face name

    @classmethod
    def open(cls, path: Path, role: str = "target", packed: bool = False) -> GgufShard:
        """Open a GGUF file as if it were a safetensors shard.

        packed: linears in Q4_0 and Q8_0 keep their integers, in compressed-tensors' pack-quantized layout. If False,
        they are dequantised.
        Raises the errors of GgufFile.open and MetadataReader: CheckpointError and UnsupportedError.
        """
        found = path.stat()
        return _opened(path, role, packed, (found.st_ino, found.st_size, found.st_mtime_ns))

    @classmethod
    def of(cls, file: GgufFile, role: str = "target", packed: bool = False) -> GgufShard:
        """Shard of a file that is open already.

        Tensors that no such model has keep their names, so that strict loading refuses them.
        """
        metadata = MetadataReader(file, role)
        kept = kept_linears(file) if packed else {}
        slices: dict[str, GgufSlice | PackedSlice] = {}
        for name, entry in file.tensors.items():
            if name == ROPE_FACTORS:
                continue
            heads = turned_heads(name, metadata.heads, metadata.kv_heads) if metadata.architecture.interleaved else None
            public, one = hf_name(name) or name, GgufSlice(file, entry, heads)
            problem = None
            if heads is not None and entry.shape[0] % (2 * heads):
                problem = f"has {entry.shape[0]} rows for {heads} heads"
            elif len(entry.shape) == 1 and entry.kind.block > 1:
                problem = f"is a vector of {entry.kind.name}"
            elif public in slices:
                problem = f"is there twice, once as {public}"
            if problem is not None:
                raise CheckpointError(f"{role} model: {file.path}: {name!r:.80} {problem}; download it again")
            if public.removesuffix(".weight") in kept:
                slices |= {public + part: PackedSlice(one, part) for part in _PARTS}
            else:
                slices[public] = one
        return cls(file, slices)

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of the file."""
        return list(self.slices)

    def get_slice(self, name: str) -> GgufSlice | PackedSlice:
        """A tensor that has not been read yet."""
        return self.slices[name]

    def get_tensor(self, name: str) -> Tensor:
        """A whole tensor: float16 or bfloat16 as stored, float32 dequantised, or a part of the packed integers."""
        return self.slices[name][:]


@dataclass(frozen=True)
class GgufSlice:
    """A tensor in the file."""

    file: GgufFile
    entry: TensorEntry
    heads: int | None

    def get_shape(self) -> list[int]:
        """Shape, outermost first."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Dtype that indexing returns, by safetensors' name."""
        name = self.entry.kind.name
        return name if name in _PLAIN else "F32"

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows of the outermost index, contiguous."""
        entry = self.entry
        data = self.stored(rows)
        shape = (len(data), *entry.shape[1:])
        dtype = _PLAIN.get(entry.kind.name)
        if dtype is not None:
            found = torch.from_numpy(np.array(data)).view(dtype)
        else:
            found = torch.from_numpy(_dequantised(data, entry))
        self.file.forget()
        return found.reshape(shape)

    def stored(self, rows: slice) -> NDArray[np.uint8]:
        """Bytes of these rows, [rows, bytes].

        Rows of queries and keys are in Hugging Face's order: elements 0, 2, ... of a head, and then 1, 3, ...
        """
        data = self.file.data(self.entry)
        if len(self.entry.shape) == 1:
            data = data.reshape(self.entry.shape[0], -1)
        if self.heads is not None:
            data = data.reshape(self.heads, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
        return data[rows]


_PARTS = ("_packed", "_scale", "_shape")


@dataclass(frozen=True)
class PackedSlice:
    """A part of a linear [N, K] of Q4_0 or Q8_0 in the layout pack-quantized.

    It is weight_packed [N, K/8 or K/4] int32, weight_scale [N, K/32] float16 or weight_shape [2] int64.
    """

    linear: GgufSlice
    part: str

    def get_shape(self) -> list[int]:
        """Shape, outermost first."""
        rows, depth = self.linear.entry.shape
        in_a_word = 32 // KEPT_BITS[self.linear.entry.kind.name]
        return {"_packed": [rows, depth // in_a_word], "_scale": [rows, depth // 32], "_shape": [2]}[self.part]

    def get_dtype(self) -> str:
        """Dtype, by safetensors' name."""
        return {"_packed": "I32", "_scale": "F16", "_shape": "I64"}[self.part]

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows of the outermost index."""
        if self.part == "_shape":
            return torch.tensor(self.linear.entry.shape)[rows]
        data = self.linear.stored(rows)
        blocks = data.reshape(len(data), -1, self.linear.entry.kind.block_bytes)  # a scale, then the integers
        if self.part == "_scale":
            found = torch.from_numpy(np.array(blocks[:, :, :2])).view(torch.float16)[..., 0]
        else:
            octets = _UNSIGNED[self.linear.entry.kind.name](blocks[:, :, 2:])
            found = torch.from_numpy(octets).view(torch.int32).reshape(len(data), -1)
        self.linear.file.forget()
        return found


def _unsigned4(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Integers of Q4_0 for pack-quantized. Byte i of Q4_0 holds inputs i and i + 16."""
    values: NDArray[np.uint8] = np.concatenate((octets & 15, octets >> 4), axis=2)
    return values[:, :, ::2] | values[:, :, 1::2] << np.uint8(4)


def _unsigned8(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Integers of Q8_0 for pack-quantized. The bytes of Q8_0 are signed."""
    return octets ^ np.uint8(128)


_UNSIGNED = {"Q4_0": _unsigned4, "Q8_0": _unsigned8}
"""Integers [rows, blocks, bytes] -> those of pack-quantized, offset by half their range, as bytes."""


@functools.lru_cache(maxsize=2)
def _opened(path: Path, role: str, packed: bool, stamp: tuple[int, ...]) -> GgufShard:
    """Open a shard, or return a cached one: loaders open a file repeatedly, and reading its header takes a while."""
    return GgufShard.of(GgufFile.open(path, role), role, packed)


def _dequantised(data: NDArray[np.uint8], entry: TensorEntry) -> NDArray[np.float32]:
    """Dequantise rows: [rows, bytes] -> [rows, elements]."""
    quants = gguf_package()
    kind = quants.GGMLQuantizationType[entry.kind.name]
    found = np.empty((len(data), entry.shape[-1]), np.float32)
    rows = max(1, _AT_ONCE // entry.shape[-1])
    for begin in range(0, len(data), rows):
        found[begin : begin + rows] = quants.dequantize(data[begin : begin + rows], kind)
    return found


def gguf_package() -> Any:
    """The module gguf.quants. DependencyError if the package is not installed."""
    try:
        from gguf import quants
    except ImportError as error:
        raise DependencyError(
            f"quantised GGUF files need the package gguf ({error}); pip install 'trtspec[gguf]'"
        ) from error
    return quants
