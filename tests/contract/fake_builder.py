"""The part of TensorRT's builder that quick-deploy plugins call, for machines where a builder cannot be made.

The plugin classes are TensorRT's own. The stand-ins replace C++ classes that Python cannot instantiate: expressions of
dimensions (here: formulas that can be evaluated) and the receivers of launch parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import tensorrt as trt
import tensorrt_bindings.plugin._plugin_class as plugin_class
import tensorrt_bindings.plugin._tensor as plugin_tensor
import torch

TRT_DTYPES = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
    torch.int32: trt.int32,
    torch.int64: trt.int64,
    torch.bool: trt.bool,
}
_OPERATIONS = {
    trt.DimensionOperation.SUM: operator.add,
    trt.DimensionOperation.SUB: operator.sub,
    trt.DimensionOperation.PROD: operator.mul,
    trt.DimensionOperation.MAX: max,
    trt.DimensionOperation.MIN: min,
    trt.DimensionOperation.FLOOR_DIV: operator.floordiv,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Dimension:
    """An IDimensionExpr: a name, a number, or an operation on two others."""

    def __init__(self, value: str | int | tuple[Any, Dimension, Dimension]) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return isinstance(self.value, int)

    def get_constant_value(self) -> int:
        assert isinstance(self.value, int)
        return self.value

    def is_size_tensor(self) -> bool:
        return False

    def at(self, sizes: dict[str, int]) -> int:
        """Value of the expression where the named dimensions have these sizes."""
        if isinstance(self.value, int):
            return self.value
        if isinstance(self.value, str):
            return sizes[self.value]
        operation, a, b = self.value
        return int(_OPERATIONS[operation](a.at(sizes), b.at(sizes)))


class ExpressionBuilder:
    """An IExprBuilder that folds constants, as TensorRT's does."""

    def constant(self, value: int) -> Dimension:
        return Dimension(value)

    def operation(self, operation: trt.DimensionOperation, a: Dimension, b: Dimension) -> Dimension:
        if a.is_constant() and b.is_constant():
            return Dimension(int(_OPERATIONS[operation](a.value, b.value)))
        return Dimension((operation, a, b))


class _SymbolicArgument:
    def __init__(self, expression: Any) -> None:
        self.expr = expression._expr


@contextmanager
def expressions() -> Iterator[ExpressionBuilder]:
    """Let TensorRT's plugin classes take `Dimension` for IDimensionExpr and lists for DimsExprs."""
    stand_ins = {name: getattr(trt, name) for name in dir(trt)}
    stand_ins |= {"IDimensionExpr": Dimension, "DimsExprs": lambda size: [None] * size}
    namespace = SimpleNamespace(**stand_ins)
    with (
        patch.object(plugin_tensor, "trt", namespace),
        patch.object(plugin_class, "trt", namespace),
        patch.object(plugin_tensor, "SymExprImpl", _SymbolicArgument),
    ):
        yield ExpressionBuilder()


def create(name: str, attributes: dict[str, Any], request: Any = None) -> Any:
    """Make the plugin `trtspec::<name>` from TensorRT's registry; request: a QuickPluginCreationRequest."""
    creator = trt.get_plugin_registry().get_creator(name, "1", "trtspec")
    assert creator is not None, f"trtspec::{name} is not registered"
    fields = [_field(key, value) for key, value in attributes.items()]  # kept alive until the plugin has copied them
    collection = trt.PluginFieldCollection(fields)
    if request is None:
        return creator.create_plugin(name, "trtspec", collection, trt.TensorRTPhase.RUNTIME)
    return creator.create_plugin(name, "trtspec", collection, trt.TensorRTPhase.BUILD, request)


def _field(name: str, value: float | int) -> Any:
    """Return an attribute as TensorRT's ONNX parser passes it: FLOAT is 32 bits wide, and so is INT."""
    if isinstance(value, float):
        return trt.PluginField(name, np.array([value], np.float32), trt.PluginFieldType.FLOAT32)
    return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)


def describe(tensor: torch.Tensor) -> Any:
    """Return the PluginTensorDesc of a tensor."""
    description = trt.PluginTensorDesc()
    description.type = TRT_DTYPES[tensor.dtype]
    description.format = trt.TensorFormat.LINEAR
    description.dims = trt.Dims(list(tensor.shape))
    return description


def enqueue(plugin: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Run a JIT plugin on host memory, through TensorRT's own enqueue."""
    plugin.get_output_data_types([TRT_DTYPES[tensor.dtype] for tensor in inputs], [tensor.ndim for tensor in inputs])
    plugin.enqueue(
        [describe(tensor) for tensor in inputs],
        [describe(tensor) for tensor in outputs],
        [tensor.data_ptr() for tensor in inputs],
        [tensor.data_ptr() for tensor in outputs],
        [tensor.stride() for tensor in inputs],
        [tensor.stride() for tensor in outputs],
        0,
    )


def output_shapes(
    plugin: Any, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[str | int]]
) -> list[list[Dimension]]:
    """Return the shapes that a plugin declares for its outputs; input dimensions are names or numbers."""
    plugin.get_output_data_types([TRT_DTYPES[dtype] for dtype in dtypes], [len(shape) for shape in shapes])
    with expressions() as builder:
        dimensions = [[Dimension(size) for size in shape] for shape in shapes]
        result: list[list[Dimension]] = plugin.get_output_shapes(dimensions, [], builder)
    return result
