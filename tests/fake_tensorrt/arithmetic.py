"""Stand-ins for layers that compute: dtype and shape of their outputs, what they refuse, and their results.

The sources are the docstrings of TensorRT's bindings and its operator reference (docs.nvidia.com, TensorRT operators).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.fake_tensorrt.api import TORCH, DataType
from tests.fake_tensorrt.layer import FLOATS, INTEGERS, Described, FakeLayer, FakeTensor, broadcast, one_dtype


class Constant(FakeLayer):
    takes = ()

    def _describe(self) -> list[Described]:
        shape, weights = self._arguments["shape"], self._arguments["weights"]
        if math.prod(shape) != weights._count:
            self._refuse(f"{weights._count} numbers for {shape}")
        return [(weights._type, tuple(shape))]

    def _known(self) -> list[int]:
        return [int(number) for number in self._value().flatten().tolist()]

    def _on_host(self) -> bool:
        return True

    def _value(self) -> Tensor:
        weights, shape = self._arguments["weights"], tuple(self._arguments["shape"])
        held: Tensor = weights._read(shape) if self._copy is None else self._copy
        return held

    _copy: Tensor | None = None  # the values in a plan, as the memory may be freed


class Shape(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        return [(DataType.INT64, (len(x.shape),))]

    def _known(self) -> list[int]:
        return list(self._given[0].shape)  # type: ignore[union-attr]

    def _on_host(self) -> bool:
        return True

    def _value(self, x: Tensor) -> Tensor:
        return torch.tensor(x.shape)


class ElementWise(FakeLayer):
    takes = ("input1", "input2")

    def _describe(self, a: FakeTensor, b: FakeTensor) -> list[Described]:
        operation, dtype = self._settings["op"].name, one_dtype(self, a, b)
        takes = FLOATS | INTEGERS | {DataType.INT8}
        takes = {"AND": {DataType.BOOL}, "OR": {DataType.BOOL}, "XOR": {DataType.BOOL}, "POW": FLOATS}.get(
            operation, takes
        )
        if dtype not in takes:
            self._refuse(f"{operation} of {dtype.name}")
        compares = operation in ("EQUAL", "GREATER", "LESS")
        return [(DataType.BOOL if compares else dtype, broadcast(self, a.shape, b.shape))]

    def _value(self, a: Tensor, b: Tensor) -> Tensor:
        integer = not a.is_floating_point()
        functions = {
            "SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "MAX": torch.maximum, "MIN": torch.minimum,
            "POW": torch.pow, "AND": torch.logical_and, "OR": torch.logical_or, "XOR": torch.logical_xor,
            "EQUAL": torch.eq, "GREATER": torch.gt, "LESS": torch.lt, "FLOOR_DIV": torch.floor_divide,
            "DIV": lambda a, b: torch.div(a, b, rounding_mode="trunc" if integer else None),
        }  # fmt: skip
        result: Tensor = functions[self._settings["op"].name](a, b)
        return result


class Unary(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        operation = self._settings["op"].name
        takes = {"NOT": {DataType.BOOL}, "NEG": FLOATS | INTEGERS}.get(operation, FLOATS)
        if x.dtype not in takes:
            self._refuse(f"{operation} of {x.dtype.name}")
        return [(DataType.BOOL if operation == "ISNAN" else x.dtype, x.shape)]

    def _value(self, x: Tensor) -> Tensor:
        functions = {
            "NOT": torch.logical_not, "NEG": torch.neg, "EXP": torch.exp, "SQRT": torch.sqrt,
            "RECIP": torch.reciprocal, "LOG": torch.log, "ISNAN": torch.isnan,
        }  # fmt: skip
        return functions[self._settings["op"].name](x)


class Activation(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        if x.dtype not in FLOATS:
            self._refuse(f"an activation of {x.dtype.name}")
        return [(x.dtype, x.shape)]

    def _value(self, x: Tensor) -> Tensor:
        how = {"GELU_ERF": "none", "GELU_TANH": "tanh"}
        return torch.nn.functional.gelu(x, approximate=how[self._settings["type"].name])


class Select(FakeLayer):
    takes = ("condition", "then_input", "else_input")

    def _describe(self, condition: FakeTensor, a: FakeTensor, b: FakeTensor) -> list[Described]:
        if condition.dtype != DataType.BOOL:
            self._refuse(f"a condition of {condition.dtype.name}")
        return [(one_dtype(self, a, b), broadcast(self, condition.shape, a.shape, b.shape))]

    def _value(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)


class Cast(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        return [(self._settings["to_type"], x.shape)]

    def _value(self, x: Tensor) -> Tensor:
        return x.to(TORCH[self._settings["to_type"]])


class Identity(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        return [(x.dtype, x.shape)]

    def _value(self, x: Tensor) -> Tensor:
        return x


class Reduce(FakeLayer):
    def _describe(self, x: FakeTensor) -> list[Described]:
        axes = self._axes(len(x.shape))
        if x.dtype not in FLOATS | INTEGERS or not axes:
            self._refuse(f"axes {axes} of {x.dtype.name} {x.shape}")
        keep = self._settings["keep_dims"]
        return [(x.dtype, tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes))]

    def _axes(self, rank: int) -> list[int]:
        return [i for i in range(rank) if self._settings["axes"] >> i & 1]

    def _value(self, x: Tensor) -> Tensor:
        operation, axes, keep = self._settings["op"].name, self._axes(x.ndim), self._settings["keep_dims"]
        if operation in ("MAX", "MIN"):
            return (torch.amax if operation == "MAX" else torch.amin)(x, axes, keepdim=keep)
        result: Tensor = {"SUM": torch.sum, "AVG": torch.mean}[operation](x, axes, keepdim=keep, dtype=x.dtype)
        return result


class Cumulative(FakeLayer):
    takes = ("input", "axis")

    def _describe(self, x: FakeTensor, axis: FakeTensor) -> list[Described]:
        if not isinstance(axis._layer, Constant) or axis.shape or x.dtype not in FLOATS | INTEGERS:
            self._refuse("the axis must be a constant without dimensions")
        if self._settings["exclusive"] or self._settings["reverse"]:
            self._refuse("not done here")
        return [(x.dtype, x.shape)]

    def _value(self, x: Tensor, axis: Tensor) -> Tensor:
        return x.cumsum(int(axis), dtype=x.dtype)


class MatrixMultiply(FakeLayer):
    takes = ("input0", "input1")

    def _describe(self, a: FakeTensor, b: FakeTensor) -> list[Described]:
        dtype = one_dtype(self, a, b)
        rows, depth = self._turned(a.shape, "op0")
        other, columns = self._turned(b.shape, "op1")
        if (
            dtype not in FLOATS
            or len(a.shape) != 2
            or len(b.shape) != 2
            or (-1 not in (depth, other) and depth != other)
        ):
            self._refuse(f"{a.shape} by {b.shape} of {dtype.name}")
        return [(dtype, (rows, columns))]

    def _turned(self, shape: tuple[int, ...], which: str) -> tuple[int, ...]:
        return shape[::-1] if self._settings[which].name == "TRANSPOSE" else shape

    def _value(self, a: Tensor, b: Tensor) -> Tensor:
        a = a.T if self._settings["op0"].name == "TRANSPOSE" else a
        return a @ (b.T if self._settings["op1"].name == "TRANSPOSE" else b)


def positive_scale(layer: FakeLayer, scale: FakeTensor) -> None:
    if not isinstance(scale._layer, Constant):
        layer._refuse("a scale that is no constant")
    if not bool((scale._layer._value() > 0).all()):
        layer._refuse("scales must be positive")


class Quantize(FakeLayer):
    takes = ("input", "scale")

    def _describe(self, x: FakeTensor, scale: FakeTensor) -> list[Described]:
        positive_scale(self, scale)
        if one_dtype(self, x, scale) not in FLOATS or scale.shape or self._settings["output_type"] != DataType.FP8:
            self._refuse(f"{x.dtype.name} with scales {scale.shape}")
        return [(DataType.FP8, x.shape)]

    def _value(self, x: Tensor, scale: Tensor) -> Tensor:
        """castToFp8(clip(x / s, -448, 448)), to nearest, ties to even."""
        return (x.float() / scale.float()).clip(-448, 448).to(torch.float8_e4m3fn)


class Dequantize(FakeLayer):
    takes = ("input", "scale")

    def _describe(self, x: FakeTensor, scale: FakeTensor) -> list[Described]:
        positive_scale(self, scale)
        if x.dtype not in (DataType.INT8, DataType.FP8):
            self._refuse(x.dtype.name)
        return [(self._settings["output_type"], x.shape)]

    def _compute(self, given: list[Tensor | None]) -> list[Tensor]:
        x, scale = given
        assert x is not None
        assert scale is not None
        if scale.ndim:
            axis = self._settings.get("axis")
            if axis is None or scale.shape != (x.shape[axis],):
                self._refuse(f"{tuple(scale.shape)} scales along axis {axis} of {tuple(x.shape)}")
            scale = scale.view([-1 if i == axis else 1 for i in range(x.ndim)])
        return [(x.to(scale.dtype) * scale)]


class Plugin(FakeLayer):
    """A layer of a plugin. The setting `plugin` is a FakePlugin."""

    takes = ("inputs", "shape_inputs")

    def _describe(self, *inputs: FakeTensor) -> list[Described]:
        result: list[Described] = self._settings["plugin"].describe(self, *inputs)
        return result

    def _compute(self, given: list[Tensor | None]) -> list[Tensor]:
        result: list[Tensor] = self._settings["plugin"].compute(given)
        return result

    def _on_host(self) -> bool:
        return False

    def _aliased(self, index: int) -> FakeTensor | None:
        source = self._settings["plugin"].aliases.get(index)
        return None if source is None else self._given[source]
