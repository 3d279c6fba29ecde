"""Checked access to the metadata of a GGUF file, which describe the model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import CheckpointError, UnsupportedError
from trtspec.gguf.file import GgufFile
from trtspec.gguf.names import ARCHITECTURES, Architecture


class MetadataReader:
    """A reader that gives typed access to the metadata. Every error names the role, the file and the entry."""

    def __init__(self, file: GgufFile, role: str) -> None:
        """Read the architecture and the numbers of heads. UnsupportedError for an unknown architecture."""
        self.file, self.role = file, role
        self.prefix = self.text("general.architecture")
        known = ARCHITECTURES.get(self.prefix)
        if known is None:
            raise self.unsupported("general.architecture", f"supported: {', '.join(ARCHITECTURES)}")
        self.architecture: Architecture = known
        self.heads = self.positive("attention.head_count")
        self.kv_heads = self.positive("attention.head_count_kv", self.heads)

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.role} model: {self.file.path}: metadata entry {key!r} {problem}; download the file again or "
            "convert the model anew"
        )

    def unsupported(self, key: str, problem: str) -> UnsupportedError:
        value = self.file.metadata.get(key)
        return UnsupportedError(
            f"{self.role} model: {self.file.path}: metadata entry {key!r} = {value!r:.80} is not read; {problem}"
        )

    def get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any = None) -> Any:
        """Value of that type; `default` if the entry is missing, or an error if `default` is None."""
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.error(key, f"({what}) is missing")
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong:
            raise self.error(key, f"= {value!r:.80} is not {what}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.get(key, str, "a text", default))

    def texts(self, key: str) -> list[str]:
        return list(self.get(key, list, "a list of texts"))

    def integers(self, key: str) -> NDArray[Any]:
        found: NDArray[Any] = self.get(key, np.ndarray, "a list of numbers")
        if found.dtype.kind not in "iu":
            raise self.error(key, "is not a list of integers")
        return found

    def floats(self, key: str) -> NDArray[Any]:
        found: NDArray[Any] = self.get(key, np.ndarray, "a list of numbers")
        if found.dtype.kind != "f" or not np.isfinite(found).all():
            raise self.error(key, "is not a list of finite numbers")
        return found

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, "true or false", default))

    def optional_id(self, key: str, size: int) -> int | None:
        """A token id; None if there is no such entry."""
        if key not in self.file.metadata:
            return None
        value = int(self.get(key, int, "a token id"))
        if not 0 <= value < size:
            raise self.error(key, f"= {value} is not one of the {size} tokens")
        return value

    # The methods below read the architecture's own entries, such as "llama.block_count".

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1. The entry may hold one for each layer if all are equal."""
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all() and value.dtype.kind in "iu":
            value = int(value[0])  # one number for each layer, all equal
        elif isinstance(value, np.ndarray):
            raise self.unsupported(name, "only models whose layers are all alike are supported")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"= {value!r:.80} is not a number of at least 1")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than 0."""
        name = f"{self.prefix}.{key}"
        value = float(self.get(name, (int, float), "a number", default))
        if not (math.isfinite(value) and value > 0):
            raise self.error(name, f"= {value!r} is not a number greater than 0")
        return value
