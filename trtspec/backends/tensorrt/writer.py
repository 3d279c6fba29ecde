"""Basic steps of writing a TensorRT network: constants, equal ranks, sizes that are known only at run time.

TensorRT's elementwise layers require operands of one rank and one dtype. Its slices take a size instead of an end. A
size that is known only at run time is itself a tensor of the network ([1] int64 here). `Writer` has these conversions.
ops.py maps ONNX operators to layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from trtspec.backends.onnx.export import OWN
from trtspec.errors import EngineError, UnsupportedError

_NAMED = 64
"""Most numbers of a constant that are part of its name, which TensorRT limits."""

Size = Any
"""A size of a dimension: an int, or a [1] int64 tensor of the network."""

_DTYPES = {
    "FLOAT": "FLOAT",
    "FLOAT16": "HALF",
    "BFLOAT16": "BF16",
    "INT64": "INT64",
    "INT32": "INT32",
    "INT8": "INT8",
    "FLOAT8E4M3FN": "FP8",
    "BOOL": "BOOL",
}
"""ONNX's name of a dtype -> TensorRT's name."""


_FLOATS = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
_NUMBERS = {**_FLOATS, "INT64": torch.int64, "INT32": torch.int32}
_WEIGHTS = {**_FLOATS, "INT8": torch.int8, "INT32": torch.int32, "FLOAT8E4M3FN": torch.float8_e4m3fn}
"""ONNX's name of a dtype -> torch dtype, for constants that may be the step's own."""


class Writer:
    """A writer of layers into one INetworkDefinition. `trt` is the module `tensorrt`.

    `kept` holds the memory to which the network's constants refer. TensorRT copies it only when an engine is built, so
    it must live until then. `weights` holds the constants that are the step's own, by their names for a refit.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt = trt
        self.network = network
        self.kept: list[Any] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.node = ""  # whose layers are being written, for their names and for errors
        self._tensors: dict[ir.Value, Any] = {}
        self._constants: dict[tuple[str, int], Any] = {}
        self._shapes: dict[int, tuple[Any, Any]] = {}  # by id of a tensor, with the tensor itself
        self._names: dict[str, int] = {}

    # --- values of the ONNX graph

    def set(self, value: ir.Value, tensor: Any) -> None:
        """Set the tensor of the network that stands for `value` from here on."""
        self._tensors[value] = tensor

    def get(self, value: ir.Value | None, rank: int | None = None) -> Any:
        """Return the tensor that stands for a value, with leading dimensions of 1 up to `rank` if that is given."""
        assert value is not None, f"{self.node}: an input is missing"
        if value in self._tensors:
            return self.lift(self._tensors[value], rank)
        held = value.const_value
        assert held is not None, f"{self.node}: {value.name} has not been written"
        shape = tuple(int(size) for size in held.shape)
        if rank is not None:
            shape = (1,) * (rank - len(shape)) + shape
        key = (str(value.name), len(shape))
        if key not in self._constants:
            self._constants[key] = self._constant_of(value, held, shape)
        return self._constants[key]

    def get_all(self, values: Sequence[ir.Value | None]) -> list[Any]:
        """Return the tensors of several values, all lifted to the largest rank among them."""
        rank = max(self.rank(value) for value in values)
        return [self.get(value, rank) for value in values]

    def rank(self, value: ir.Value | None) -> int:
        assert value is not None
        if value not in self._tensors and value.const_value is not None:
            return len(value.const_value.shape)
        return len(self.get(value).shape)

    def known(self, value: ir.Value | None, what: str) -> list[int]:
        """Return the integers of a constant. UnsupportedError, which names `what`, if the value is not constant."""
        if value is None or value.const_value is None:
            raise UnsupportedError(f"TensorRT: {what} of node {self.node!r} is not a constant; please report this")
        return [int(number) for number in np.atleast_1d(value.const_value.numpy()).tolist()]

    # --- constants

    def integers(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Any:
        """Return a constant tensor [n] of these numbers."""
        key = (f"{dtype}{list(numbers)}", 1)
        if key not in self._constants:
            self._constants[key] = self._constant(torch.tensor(list(numbers), dtype=dtype), (len(numbers),))
        return self._constants[key]

    def number(self, number: float, like: Any, rank: int = 0) -> Any:
        """Return one number as a constant with `rank` dimensions of 1 and the dtype of `like`."""
        names = {name: getattr(self.trt.DataType, _DTYPES[name]) for name in _NUMBERS}
        dtype = next((_NUMBERS[name] for name, kind in names.items() if kind == like.dtype), None)
        if dtype is None:
            raise UnsupportedError(f"TensorRT: node {self.node!r} has a number of {like.dtype}; please report this")
        key = (f"{dtype}{number}", rank)
        if key not in self._constants:
            self._constants[key] = self._constant(torch.tensor(number, dtype=dtype), (1,) * rank)
        return self._constants[key]

    def _constant(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> Any:
        kinds = {dtype: getattr(self.trt.DataType, _DTYPES[name]) for name, dtype in _NUMBERS.items()}
        self.kept.append(tensor)
        weights = self.trt.Weights(kinds[tensor.dtype], tensor.data_ptr(), tensor.numel())
        numbers = tensor.tolist() if tensor.numel() <= _NAMED else hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        name = f"constant_{str(tensor.dtype).removeprefix('torch.')}_{len(shape)}d_{numbers}"
        return self.out(self.network.add_constant(shape, weights), name=name)

    def _constant_of(self, value: ir.Value, held: ir.TensorProtocol, shape: tuple[int, ...]) -> Any:
        raw = getattr(held, "raw", None)
        if not (isinstance(raw, torch.Tensor) and raw.is_contiguous()):
            raw = torch.frombuffer(bytearray(held.tobytes()), dtype=torch.uint8)
        self.kept.append(raw)
        weights = self.trt.Weights(self.dtype(held.dtype), raw.data_ptr(), int(np.prod(shape, dtype=np.int64)))
        lifted = len(shape) > len(held.shape)
        tensor = self.out(self.network.add_constant(shape, weights), name=f"{value.name}{f':{len(shape)}d' * lifted}")
        name, kind = str(value.name), _WEIGHTS.get(held.dtype.name)
        if name.startswith(OWN) and kind is not None and not lifted:
            self.network.set_weights_name(weights, name)
            self.weights[name] = raw if raw.dtype == kind else raw.view(kind)
        return tensor

    def dtype(self, dtype: Any) -> Any:
        """Return TensorRT's dtype for one of ONNX. UnsupportedError if there is none."""
        if dtype is None or dtype.name not in _DTYPES:
            raise UnsupportedError(f"TensorRT: node {self.node!r} has a tensor of {dtype}; please report this")
        return getattr(self.trt.DataType, _DTYPES[dtype.name])

    # --- layers

    def out(self, layer: Any, name: str | None = None) -> Any:
        """Name a layer just added and return its first output. EngineError if TensorRT refused the layer.

        name: name of the layer; None = the name of the current node.
        """
        if layer is None:
            raise EngineError(f"TensorRT refused a layer for node {self.node!r}; its log says why. Please report this")
        if name is None:
            count = self._names[self.node] = self._names.get(self.node, 0) + 1
            name = self.node if count == 1 else f"{self.node}:{count}"
        layer.name = name
        return layer.get_output(0)

    def binary(self, operation: str, a: Any, b: Any) -> Any:
        """Write an elementwise layer on two tensors, and lift the smaller rank to the other."""
        rank = max(len(a.shape), len(b.shape))
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.out(self.network.add_elementwise(self.lift(a, rank), self.lift(b, rank), kind))

    def unary(self, operation: str, x: Any) -> Any:
        return self.out(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)))

    def cast(self, x: Any, dtype: Any) -> Any:
        return x if x.dtype == dtype else self.out(self.network.add_cast(x, dtype))

    def lift(self, x: Any, rank: int | None) -> Any:
        """Return a tensor with leading dimensions of 1 up to `rank`."""
        missing = 0 if rank is None else rank - len(x.shape)
        return x if missing <= 0 else self.unsqueeze(x, range(missing))

    def gather(self, x: Any, indices: Any) -> Any:
        """Gather along the first dimension."""
        return self.out(self.network.add_gather(x, indices, 0))

    def sum(self, x: Any, axis: int) -> Any:
        """Sum over one dimension, which is removed."""
        return self.out(self.network.add_reduce(x, self.trt.ReduceOperation.SUM, 1 << axis, False))

    def cumulative_sum(self, x: Any) -> Any:
        """Cumulative sum of [n] integers."""
        kind = self.trt.CumulativeOperation.SUM
        return self.out(self.network.add_cumulative(x, self.number(0, x), kind, False, False))

    def count(self, size: Size, like: Any) -> Any:
        """Return the integers 0, 1, ... as a tensor [size] with the dtype of `like`."""
        given = self.vector([size]), self.number(0, like), self.number(1, like, 1)
        layer = self.network.add_fill((0,), self.trt.FillOperation.LINSPACE, like.dtype)
        out = self.out(layer)
        for index, tensor in enumerate(given):
            layer.set_input(index, tensor)
        return out

    def unsqueeze(self, x: Any, axes: Sequence[int]) -> Any:
        return self.out(self.network.add_unsqueeze(x, self.integers(list(axes))))

    def squeeze(self, x: Any, axes: Sequence[int]) -> Any:
        return self.out(self.network.add_squeeze(x, self.integers(list(axes))))

    def swap(self, x: Any) -> Any:
        """Swap dimensions 1 and 2 of a tensor with four."""
        layer = self.network.add_shuffle(x)
        out = self.out(layer)
        layer.first_transpose = (0, 2, 1, 3)
        return out

    def flat(self, x: Any) -> Any:
        """Join the first two dimensions of a tensor. The others must be fixed."""
        layer = self.network.add_shuffle(x)
        out = self.out(layer)
        layer.reshape_dims = (-1, *x.shape[2:])
        return out

    # --- sizes

    def shape(self, x: Any) -> Any:
        """Return the shape of a tensor, [rank] int64."""
        if id(x) not in self._shapes:
            self._shapes[id(x)] = x, self.out(self.network.add_shape(x))
        return self._shapes[id(x)][1]

    def size(self, x: Any, axis: int) -> Size:
        """Size of a dimension; an int if the size is fixed."""
        if x.shape[axis] >= 0:
            return int(x.shape[axis])
        return self.out(self.network.add_slice(self.shape(x), (axis,), (1,), (1,)))

    def sizes(self, x: Any) -> list[Size]:
        return [self.size(x, axis) for axis in range(len(x.shape))]

    def vector(self, sizes: Sequence[Size]) -> Any:
        """Return sizes as one tensor [n] int64."""
        parts: list[Any] = []
        numbers: list[int] = []
        for size in (*sizes, None):
            if isinstance(size, int):
                numbers.append(size)
                continue
            if numbers:
                parts.append(self.integers(numbers))
                numbers = []
            if size is not None:
                parts.append(size)
        return parts[0] if len(parts) == 1 else self.concat(parts, 0)

    def combine(self, operation: str, a: Size, b: Size) -> Size:
        """Return SUM, SUB, MAX or MIN of two sizes."""
        if isinstance(a, int) and isinstance(b, int):
            number: dict[str, Callable[[int, int], int]] = {
                "SUM": int.__add__, "SUB": int.__sub__, "MAX": max, "MIN": min,
            }  # fmt: skip
            return number[operation](a, b)
        return self.binary(operation, *(self.integers([size]) if isinstance(size, int) else size for size in (a, b)))

    def concat(self, tensors: Sequence[Any], axis: int) -> Any:
        layer = self.network.add_concatenation(list(tensors))
        out = self.out(layer)
        layer.axis = axis
        return out

    def slice(
        self, x: Any, start: Sequence[Size], size: Sequence[Size], stride: Sequence[int], fill: Any = None
    ) -> Any:
        """Return the elements start + i * stride for i < size, along every dimension.

        fill: a scalar for elements outside `x`.
        """

        zeros = (0,) * len(x.shape)
        open_at = [i for i, sizes in ((1, start), (2, size)) if not all(isinstance(one, int) for one in sizes)]
        given = [(i, self.vector((start, size)[i - 1])) for i in open_at]
        fixed = [zeros if i in open_at else tuple(sizes) for i, sizes in ((1, start), (2, size))]
        layer = self.network.add_slice(x, fixed[0], fixed[1], tuple(stride))
        out = self.out(layer)
        for index, vector in given:
            layer.set_input(index, vector)
        if fill is not None:
            layer.mode = self.trt.SampleMode.FILL
            layer.set_input(4, fill)
        return out
