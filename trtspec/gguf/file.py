"""The header of a GGUF file: typed metadata, and the position of each tensor.

Layout, little-endian: "GGUF", version, number of tensors, number of metadata entries. The entries follow, then name,
shape (innermost first), kind and offset of each tensor. The tensors come last, each at a multiple of the alignment.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A file may come from anywhere. Every count is compared with the number of bytes left before anything is read, so the
size of the file bounds memory. Anything impossible is a CheckpointError that names it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import CheckpointError, UnsupportedError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32
_SPLIT_KEY = "split.count"
_MOST_TEXTS = 1 << 22  # in one array: pieces or merges of a vocabulary; the largest in use have under a million
_MOST_DIMENSIONS = 4

# Kinds of metadata values, by number.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorType(NamedTuple):
    """A storage format of numbers: blocks of `block` numbers in `block_bytes` bytes each."""

    name: str
    block: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""Storage format by the number that files use for it (ggml_type)."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in the header. shape: outermost first. offset: bytes from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the elements that share all but the innermost index."""
        return self.shape[-1] // self.kind.block * self.kind.block_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is open.

    metadata: numbers, booleans, texts, lists of texts and numpy arrays of numbers, by their keys.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    _bytes: mmap.mmap

    @classmethod
    def open(cls, path: Path, role: str = "target") -> GgufFile:
        """Open a file and read its header. `role` ("target", "draft") names the model in error messages.

        Raises CheckpointError for a file that is no GGUF file or is damaged. Raises UnsupportedError for a version, a
        split or a kind of tensor that cannot be read.
        """
        try:
            with path.open("rb") as file:
                if file.read(4) != _MAGIC:
                    raise CheckpointError(f"{role} model: {path} is no GGUF file; download or copy it again")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{role} model: {path} cannot be read ({error})") from error
        header = _Header(mapped, f"{role} model: {path}")
        try:
            return cls(path, *header.read(), mapped)
        except RecursionError as error:
            raise header.damaged("its metadata is nested") from error

    def data(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """Bytes of a tensor, [rows, row_bytes], as a view of the file."""
        flat = np.frombuffer(self._bytes, np.uint8, entry.nbytes, entry.offset)
        return flat.reshape(-1, entry.row_bytes)

    def forget(self) -> None:
        """Release the pages that were read from the file, so that they no longer count as our memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)


class _Header:
    """A reader of the header's bytes, which advances as it reads."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.at = data, where, len(_MAGIC)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged or truncated: {what}; download or copy it again")

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        version = self.scalar("I", "its version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            why = "its numbers are big-endian" if swapped in _VERSIONS else f"it is of version {version}"
            raise UnsupportedError(
                f"{self.where}: {why}; supported: little-endian files of version {' and '.join(map(str, _VERSIONS))}. "
                "Convert the model again with a current llama.cpp"
            )
        num_tensors = self.count("tensors", 8 + 4 + 8 + 4 + 8)
        num_entries = self.count("metadata entries", 8 + 4 + 1)
        metadata = self.metadata(num_entries)
        if (parts := metadata.get(_SPLIT_KEY, 0)) not in (0, 1):
            raise UnsupportedError(
                f"{self.where} is one of {parts} parts of a model; join them first: llama-gguf-split --merge FIRST OUT"
            )
        alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"{_ALIGNMENT_KEY} = {alignment!r} is no power of two")
        return metadata, self.tensors(num_tensors, alignment)

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("the name of a metadata entry")
            if key in found:
                raise self.damaged(f"the metadata entry {key!r:.80} is there twice")
            found[key] = self.value(self.scalar("I", f"the type of {key!r:.80}"), key)
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        entries = []
        for _ in range(count):
            name = self.text("the name of a tensor")
            what = f"tensor {name!r:.80}"
            dimensions = self.scalar("I", what)
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self.damaged(f"{what} has {dimensions} dimensions")
            shape = tuple(self.scalar("Q", what) for _ in range(dimensions))[::-1]
            number, offset = self.scalar("I", what), self.scalar("Q", what)
            kind = TENSOR_TYPES.get(number)
            if kind is None:
                raise UnsupportedError(
                    f"{self.where}: {what} is of kind {number} (ggml_type); supported: "
                    f"{', '.join(known.name for known in TENSOR_TYPES.values())}. Quantise the model to one of these"
                )
            if math.prod(shape) < 1 or shape[-1] % kind.block:
                raise self.damaged(f"{what} of kind {kind.name} has the shape {shape}")
            if offset % alignment:
                raise self.damaged(f"{what} begins at {offset}, no multiple of {alignment}")
            entries.append(TensorEntry(name, shape, kind, offset))
        begin = -(-self.at // alignment) * alignment
        found: dict[str, TensorEntry] = {}
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.name in found:
                raise self.damaged(f"tensor {entry.name!r:.80} is there twice")
            if entry.offset < end:
                raise self.damaged(f"tensor {entry.name!r:.80} begins inside another")
            end = entry.offset + entry.nbytes
            if begin + end > len(self.data):
                raise self.damaged(f"tensor {entry.name!r:.80} ends at byte {begin + end} of {len(self.data)}")
            found[entry.name] = TensorEntry(entry.name, entry.shape, entry.kind, begin + entry.offset)
        return found

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.damaged(f"{key!r:.80} is of the unknown type {kind}")
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> list[str] | NDArray[Any]:
        kind = self.scalar("I", key)
        if kind == _STRING:
            count = self.count(f"elements of {key!r:.80}", 8)
            if count > _MOST_TEXTS:
                raise self.damaged(f"{key!r:.80} has {count} elements")
            return [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:  # arrays of arrays are allowed, but no program writes them
            raise self.damaged(f"{key!r:.80} has elements of the type {kind}")
        dtype = np.dtype(f"<{_SCALARS[kind]}") if _SCALARS[kind] != "?" else np.dtype(np.bool_)
        count = self.count(f"elements of {key!r:.80}", dtype.itemsize)
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found

    def count(self, what: str, least_bytes: int) -> int:
        """Read the number of items, of which each takes at least `least_bytes` bytes."""
        found = int(self.scalar("Q", f"the number of {what}"))
        if found * least_bytes > len(self.data) - self.at:
            raise self.damaged(f"there cannot be {found} {what} in {len(self.data)} bytes")
        return found

    def text(self, what: str) -> str:
        length = self.count(f"bytes of {what}", 1)
        begin, self.at = self.at, self.at + length
        try:
            return self.data[begin : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is no text ({error})") from error

    def scalar(self, code: str, what: str) -> Any:
        reader = struct.Struct(f"<{code}")
        if self.at + reader.size > len(self.data):
            raise self.damaged(f"it ends in {what}")
        (found,) = reader.unpack_from(self.data, self.at)
        self.at += reader.size
        return found
