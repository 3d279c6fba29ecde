"""A stand-in for the module `tensorrt`, for machines that cannot make a builder: without a GPU or without TensorRT.

Its classes have the methods, parameters and properties of TensorRT's Python bindings, as recorded in
tests/contract/tensorrt_api.json. Anything else is an error. A network records its layers, and each tensor has the dtype
and shape that TensorRT documents for it. The network refuses what TensorRT documents as wrong: ranks, dtypes, sizes
computed from data. It also computes: `FakeNetwork._run` returns each layer's documented result (arithmetic.py,
moves.py).

It is not TensorRT. A network that passes here means what it should, but TensorRT may still fail to build it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

API = json.loads((Path(__file__).parents[1] / "contract" / "tensorrt_api.json").read_text(encoding="utf-8"))


class Misuse(Exception):
    """An error for what TensorRT would refuse."""


def _enumerations() -> dict[str, Any]:
    return {name: IntEnum(name, members) for name, members in API["enums"].items()}  # type: ignore[misc]


ENUMS = _enumerations()
DataType = ENUMS["DataType"]
TORCH = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.FP8: torch.float8_e4m3fn,
    DataType.BOOL: torch.bool,
}


def _members(cls: str, kind: str) -> dict[str, Any]:
    """Methods (or properties) of a class, inherited ones included."""
    found: dict[str, Any] = {}
    while cls in API["classes"]:
        own = API["classes"][cls][kind]
        found = {**(own if kind == "methods" else dict.fromkeys(own)), **found}
        cls = API["classes"][cls]["base"]
    return found


def bind(cls: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, for the first overload that accepts them. Misuse if no overload does."""
    overloads = _members(cls, "methods").get(method)
    if overloads is None:
        raise Misuse(f"{cls} has no method {method}")
    for overload in overloads:
        names = [name for name, _ in overload["takes"]]
        if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
            continue
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        if all(name in bound or default for name, default in overload["takes"]):
            return bound
    raise Misuse(f"{cls}.{method} does not take {len(args)} arguments and {sorted(kwargs)}: {overloads}")


class Stand:
    """An object of class `_cls`. API lists its members, `_<method>` implements a method, properties are kept as set."""

    _cls = ""

    def __getattr__(self, name: str) -> Any:
        if name in _members(self._cls, "methods"):
            does: Callable[..., Any] | None = getattr(type(self), f"_{name}", None)
            if does is None:
                raise Misuse(f"the stand-in for {self._cls} does not do {name}")
            return lambda *args, **kwargs: does(self, **bind(self._cls, name, args, kwargs))
        raise Misuse(f"{self._cls} has no {name}, or it has not been set")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _members(self._cls, "properties"):
            raise Misuse(f"{self._cls} has no property {name}")
        object.__setattr__(self, name, value)


class Weights(Stand):
    """Weights that refer to memory, as TensorRT's do."""

    _cls = "Weights"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = bind("Weights", "__init__", args, kwargs)
        self._type, self._address, self._count = bound["type"], bound["ptr"], bound["count"]

    def _read(self, shape: tuple[int, ...]) -> Tensor:
        """A copy of what the memory holds now."""
        element = TORCH[self._type]
        size = self._count * element.itemsize
        if size == 0:
            return torch.empty(shape, dtype=element)
        raw = torch.frombuffer(bytearray(ctypes.string_at(self._address, size)), dtype=torch.uint8)
        return raw.view(element).view(shape)
