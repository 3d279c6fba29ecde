"""Storage of a linear's weight in a quantised checkpoint, and rules for which linears are quantised."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from trtspec.config.checkpoint.reader import Reader, short

GROUP_MULTIPLE = 32
"""A group of any multiple of this number of inputs is held as groups of 32, 64 or 128 whose scales repeat."""


@dataclass(frozen=True)
class IntegerScheme:
    """The storage of one linear's weight as integers.

    layout: "pack-quantized", "int-quantized", "gptq" or "awq". group_size: number of inputs that share a scale, None =
    all. symmetric: the zero point is the middle of the range and is not stored (gptq stores it nevertheless). ordered:
    there is a g_idx, the group of each input. zero_offset: number to add to a stored zero point.
    """

    kind: ClassVar[str] = "int"

    layout: str
    bits: int
    group_size: int | None
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0

    def __str__(self) -> str:
        return (
            f"int{self.bits} {'per output channel' if self.group_size is None else f'in groups of {self.group_size}'}"
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """Values of EngineConfig.quantization that mean the same bits and, for 4 bits, the same groups."""
        if self.bits == 8:
            return ("int8",)
        words = {128: "int4_g128", 64: "int4_g64", 32: "int4"}
        if self.group_size is None:
            return tuple(words.values())
        return (next(word for size, word in words.items() if self.group_size % size == 0),)

    @property
    def int8_groups(self) -> bool:
        """Whether the weights have 8 bits, and more than one scale per output channel."""
        return self.bits == 8 and self.group_size is not None

    @property
    def held(self) -> Hashable:
        """Properties in which linears must agree to be held as one matrix."""
        return self.bits, self.int8_groups


@dataclass(frozen=True)
class Fp8Scheme:
    """The storage of one linear's weight as float8_e4m3fn.

    scale_dims: dimensions of the weight's scale: 0 = one number, 1 = [N], 2 = [N, 1]. static: inputs are rounded, too,
    to multiples of one stored scale. Otherwise inputs are not rounded, even if they were meant to be rounded
    dynamically.
    """

    kind: ClassVar[str] = "fp8"

    scale_dims: int
    static: bool

    def __str__(self) -> str:
        return f"fp8 per {'output channel' if self.scale_dims else 'tensor'}{', its inputs too' if self.static else ''}"

    @property
    def requests(self) -> tuple[str, ...]:
        """Values of EngineConfig.quantization that mean the same: there are none."""
        return ()

    @property
    def held(self) -> Hashable:
        """Properties in which linears must agree to be held as one matrix."""
        return "fp8", self.static


WeightScheme: TypeAlias = IntegerScheme | Fp8Scheme


@dataclass(frozen=True)
class Rule:
    """The scheme of the linears whose name in the checkpoint fits `pattern`; None = not quantised.

    kind says how the pattern fits a name: "name" (equal), "re" (a regular expression for its beginning), "part" (a part
    of it), "suffix", "glob" (wildcards, for the name or for a module that contains it), "all".
    """

    kind: str
    pattern: str
    scheme: WeightScheme | None

    def fits(self, module: str) -> bool:
        """Whether this rule applies to the linear."""
        if self.kind == "re":
            return re.match(self.pattern, module) is not None
        if self.kind == "part":
            return self.pattern in module
        if self.kind == "glob":
            return any(fnmatch.fnmatchcase(module, pattern) for pattern in (self.pattern, f"{self.pattern}.*"))
        if self.kind == "suffix":
            return f".{module}".endswith(f".{self.pattern}")
        return self.kind == "all" or module == self.pattern


def check_integers(
    read: Reader, bits: tuple[str, int], size: tuple[str, int | None], symmetric: tuple[str, bool]
) -> None:
    """Raise UnsupportedError for what the kernels cannot hold. Each argument is (field, value)."""
    if bits[1] not in (4, 8):
        raise read.unsupported(bits[0], "only 4 and 8 bits are supported")
    if bits[1] == 8 and not symmetric[1]:
        raise read.unsupported(
            symmetric[0],
            "8-bit weights have no zero points here; use a 4-bit checkpoint, or the unquantised one with "
            "quantization='int8'",
        )
    if size[1] is not None and (size[1] < 1 or size[1] % GROUP_MULTIPLE):
        raise read.unsupported(
            size[0],
            f"weights come in groups of a multiple of {GROUP_MULTIPLE} inputs, or per output channel; use such a "
            f"checkpoint, or the unquantised one with quantization='int{bits[1]}'",
        )


def strings(read: Reader, key: str) -> list[str]:
    """The strings at `key` in one list. The field may be a list of strings, or of lists of strings, or missing."""
    value = read.get(key) or []
    flat: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        flat += entry if isinstance(entry, list) else [entry]
    if any(not isinstance(entry, str) or not entry for entry in flat):
        raise read.error(key, f"= {short(value)} is not a list of names; correct it in the file")
    return flat
