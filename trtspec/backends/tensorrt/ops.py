"""Layers of a TensorRT network for each operator of an exported step: `OPS`, op_type -> function(writer, node).

The operators are exactly those that export_onnx and write_linears write for any step. Any other operator is an error
that names it. The dtypes that TensorRT's operators take are from its operator reference (docs.nvidia.com, TensorRT
operators).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir

from trtspec.backends.tensorrt.bits import BITS
from trtspec.backends.tensorrt.writer import Size, Writer
from trtspec.errors import UnsupportedError

Op = Callable[[Writer, ir.Node], list[Any]]
_FAR = 2**31
"""Least end of a slice that means: up to the end of the dimension."""


def write_node(w: Writer, node: ir.Node) -> None:
    """Write a node of the standard domain. UnsupportedError if it is not in OPS."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in OPS:
        name = f"{node.domain}::{node.op_type}".removeprefix("::")
        raise UnsupportedError(
            f"TensorRT: the step has an operator {name} (node {node.name!r}), which is not written; known are "
            f"{', '.join(sorted(OPS))}. Please report this"
        )
    w.node = node.name or node.op_type
    for value, tensor in zip(node.outputs, OPS[node.op_type](w, node), strict=True):
        w.set(value, tensor)


def _number(node: ir.Node, name: str, default: int = 0) -> int:
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


# --- element by element


def _binary(operation: str, w: Writer, node: ir.Node) -> list[Any]:
    return [w.binary(operation, *w.get_all(node.inputs))]


def _unary(operation: str, w: Writer, node: ir.Node) -> list[Any]:
    return [w.unary(operation, w.get(node.inputs[0]))]


def _equal(w: Writer, node: ir.Node) -> list[Any]:
    a, b = w.get_all(node.inputs)
    if a.dtype == w.trt.DataType.BOOL:  # EQUAL takes no booleans
        return [w.unary("NOT", w.binary("XOR", a, b))]
    return [w.binary("EQUAL", a, b)]


def _or_equal(operation: str, w: Writer, node: ir.Node) -> list[Any]:
    a, b = w.get_all(node.inputs)
    return [w.binary("OR", w.binary(operation, a, b), w.binary("EQUAL", a, b))]


def _mod(w: Writer, node: ir.Node) -> list[Any]:
    """Write Mod of integers, with the sign of the divisor: a - floor(a / b) * b."""
    a, b = w.get_all(node.inputs)
    if _number(node, "fmod"):
        raise UnsupportedError(f"TensorRT: node {w.node!r} is a Mod of floating-point numbers; please report this")
    return [w.binary("SUB", a, w.binary("PROD", w.binary("FLOOR_DIV", a, b), b))]


def _clip(w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    for bound, operation in zip(node.inputs[1:], ("MAX", "MIN"), strict=False):
        if bound is not None:
            x = w.binary(operation, x, w.get(bound, len(x.shape)))
    return [x]


def _gelu(w: Writer, node: ir.Node) -> list[Any]:
    how = node.attributes["approximate"].as_string() if "approximate" in node.attributes else "none"
    kind = w.trt.ActivationType.GELU_TANH if how == "tanh" else w.trt.ActivationType.GELU_ERF
    return [w.out(w.network.add_activation(w.get(node.inputs[0]), kind))]


def _where(w: Writer, node: ir.Node) -> list[Any]:
    return [w.out(w.network.add_select(*w.get_all(node.inputs)))]


def _cast(w: Writer, node: ir.Node) -> list[Any]:
    x, to = w.get(node.inputs[0]), ir.DataType(_number(node, "to"))
    if to == ir.DataType.UINT64 and x.dtype == w.trt.DataType.INT64:
        return [x]  # the same bits, see bits.py
    return [w.cast(x, w.dtype(to))]


def _cast_like(w: Writer, node: ir.Node) -> list[Any]:
    return [w.cast(w.get(node.inputs[0]), w.get(node.inputs[1]).dtype)]


# --- along dimensions


def _reduce(operation: str, w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    axes = w.known(node.inputs[1], "axes")
    mask = sum(1 << _axis(axis, len(x.shape)) for axis in axes)
    kind = getattr(w.trt.ReduceOperation, operation)
    return [w.out(w.network.add_reduce(x, kind, mask, bool(_number(node, "keepdims", 1))))]


def _cumulative_sum(w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    exclusive, reverse = bool(_number(node, "exclusive")), bool(_number(node, "reverse"))
    axis = w.get(node.inputs[1])
    return [w.out(w.network.add_cumulative(x, axis, w.trt.CumulativeOperation.SUM, exclusive, reverse))]


def _concat(w: Writer, node: ir.Node) -> list[Any]:
    tensors = [w.get(value) for value in node.inputs]
    return [w.concat(tensors, _axis(_number(node, "axis"), len(tensors[0].shape)))]


def _split(w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    axis = _axis(_number(node, "axis"), len(x.shape))
    if len(node.inputs) > 1:
        lengths = w.known(node.inputs[1], "lengths of the parts")
    else:
        count, length = _number(node, "num_outputs", len(node.outputs)), int(x.shape[axis])
        each = -(-length // count)
        lengths = [min(each, length - each * i) for i in range(count)]
    sizes, parts, first = w.sizes(x), [], 0
    for length in lengths:
        start: list[Size] = [0] * len(x.shape)
        start[axis], sizes[axis] = first, length
        parts.append(w.slice(x, start, sizes, [1] * len(x.shape)))
        first += length
    return parts


def _slice(w: Writer, node: ir.Node) -> list[Any]:
    """Write Slice. Fixed starts and ends may count from the end of the dimension.

    Computed starts and ends are sizes or remainders of sizes, so not negative.
    """
    x = w.get(node.inputs[0])
    rank = len(x.shape)
    starts, ends, axes, steps = (*node.inputs[1:], None, None)[:4]
    along = [_axis(axis, rank) for axis in w.known(axes, "axes")] if axes is not None else list(range(rank))
    if steps is not None and set(w.known(steps, "steps")) != {1}:
        raise UnsupportedError(f"TensorRT: node {w.node!r} is a slice with steps other than 1; please report this")
    first, sizes = [0] * rank, w.sizes(x)
    low, high = _bounds(w, starts, along), _bounds(w, ends, along)
    start: list[Size] = list(first)
    for axis, one, other in zip(along, low, high, strict=True):
        length = sizes[axis]
        start[axis] = _within(w, one, length)
        end = length if isinstance(other, int) and other >= _FAR else _within(w, other, length)
        if isinstance(start[axis], int) and start[axis] == 0:
            sizes[axis] = end
        else:
            sizes[axis] = w.combine("MAX", w.combine("SUB", end, start[axis]), 0)
    return [w.slice(x, start, sizes, [1] * rank)]


def _bounds(w: Writer, value: ir.Value | None, along: list[int]) -> list[Size]:
    assert value is not None
    if value.const_value is not None:
        return list(w.known(value, "bounds"))
    if len(along) != 1:
        raise UnsupportedError(f"TensorRT: node {w.node!r} computes several bounds at once; please report this")
    return [w.get(value)]


def _within(w: Writer, bound: Size, length: Size) -> Size:
    """Return a bound of a slice as an index 0..length."""
    if isinstance(bound, int) and bound < 0:
        return w.combine("MAX", w.combine("SUM", length, bound), 0)
    if isinstance(bound, int) and bound == 0:
        return 0
    return w.combine("MIN", bound, length)


def _pad(w: Writer, node: ir.Node) -> list[Any]:
    """Write Pad as a slice that begins before the tensor and ends after it."""
    x = w.get(node.inputs[0])
    rank = len(x.shape)
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        raise UnsupportedError(f"TensorRT: node {w.node!r} pads some axes by name; please report this")
    pads = w.known(node.inputs[1], "pads")
    value = node.inputs[2] if len(node.inputs) > 2 else None
    fill = w.number(0, x) if value is None else w.get(value)
    sizes = [w.combine("SUM", size, pads[i] + pads[rank + i]) for i, size in enumerate(w.sizes(x))]
    return [w.slice(x, [-before for before in pads[:rank]], sizes, [1] * rank, fill)]


def _expand(w: Writer, node: ir.Node) -> list[Any]:
    """Write Expand as a slice with stride 0 along dimensions that are always 1. The others keep their sizes."""
    if w.rank(node.inputs[1]) != 1:
        raise UnsupportedError(f"TensorRT: node {w.node!r} expands to a shape that is no vector; please report this")
    shape = w.get(node.inputs[1])
    rank = max(int(shape.shape[0]), w.rank(node.inputs[0]))
    x = w.get(node.inputs[0], rank)
    if all(size == 1 for size in x.shape) and rank == int(shape.shape[0]):
        return [_repeated(w, x, shape)]
    first = rank - int(shape.shape[0])  # dimensions that only x has
    sizes = w.sizes(x)
    for axis, size in enumerate(x.shape):
        if size == 1 and axis >= first:
            sizes[axis] = w.out(w.network.add_slice(shape, (axis - first,), (1,), (1,)))
    return [w.slice(x, [0] * rank, sizes, [int(size != 1) for size in x.shape])]


def _constant_of_shape(w: Writer, node: ir.Node) -> list[Any]:
    shape, held = w.get(node.inputs[0]), node.attributes["value"].as_tensor()
    number = w.get(ir.Value(name=f"{w.node}.value", const_value=held))  # [1]
    return [_repeated(w, w.lift(number, int(shape.shape[0])), shape)]


def _repeated(w: Writer, x: Any, shape: Any) -> Any:
    """Return a tensor of `shape` filled with one number, which has the same number of dimensions."""
    rank = len(x.shape)
    layer = w.network.add_slice(x, (0,) * rank, (0,) * rank, (0,) * rank)
    out = w.out(layer)
    layer.set_input(2, shape)
    return out


def _reshape(w: Writer, node: ir.Node) -> list[Any]:
    x, shape = w.get(node.inputs[0]), node.inputs[1]
    assert shape is not None
    given = None if shape.const_value is not None else w.get(shape)
    layer = w.network.add_shuffle(x)
    out = w.out(layer)
    layer.zero_is_placeholder = not _number(node, "allowzero")
    if given is None:
        layer.reshape_dims = tuple(w.known(shape, "shape"))
    else:
        layer.set_input(1, given)
    return [out]


def _unsqueeze(w: Writer, node: ir.Node) -> list[Any]:
    return [w.unsqueeze(w.get(node.inputs[0]), w.known(node.inputs[1], "axes"))]


def _squeeze(w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    named = len(node.inputs) > 1
    axes = w.known(node.inputs[1], "axes") if named else [i for i, size in enumerate(x.shape) if size == 1]
    return [w.squeeze(x, axes)]


def _shape(w: Writer, node: ir.Node) -> list[Any]:
    x = w.get(node.inputs[0])
    rank = len(x.shape)
    start, end = _axis(_number(node, "start"), rank), _axis(min(_number(node, "end", rank), rank), rank)
    return [w.vector([w.size(x, axis) for axis in range(start, end)])]


def _range(w: Writer, node: ir.Node) -> list[Any]:
    """Write Range with step 1: start, start + 1, ... before limit."""
    start, limit = (w.get(value) for value in node.inputs[:2])
    if w.known(node.inputs[2], "step") != [1]:
        raise UnsupportedError(f"TensorRT: node {w.node!r} counts by other than 1; please report this")
    count = limit if w.known(node.inputs[0], "start") == [0] else w.binary("SUB", limit, start)
    size, delta = w.unsqueeze(w.cast(count, w.trt.DataType.INT64), [0]), w.get(node.inputs[2], 1)
    layer = w.network.add_fill((0,), w.trt.FillOperation.LINSPACE, limit.dtype)
    out = w.out(layer)
    for index, tensor in enumerate((size, start, delta)):
        layer.set_input(index, tensor)
    return [out]


# --- gathers: an index must be within its dimension and not negative


def _gather(w: Writer, node: ir.Node) -> list[Any]:
    x, indices = w.get(node.inputs[0]), node.inputs[1]
    axis = _axis(_number(node, "axis"), len(x.shape))
    assert indices is not None
    if indices.const_value is not None and min(w.known(indices, "indices")) < 0:
        raise UnsupportedError(f"TensorRT: node {w.node!r} gathers at a negative index; please report this")
    return [w.out(w.network.add_gather(x, w.get(indices), axis))]


def _gather_mode(mode: str, w: Writer, node: ir.Node) -> list[Any]:
    x, indices = (w.get(value) for value in node.inputs)
    layer = w.network.add_gather_v2(x, indices, getattr(w.trt.GatherMode, mode))
    out = w.out(layer)
    if mode == "ELEMENT":
        layer.axis = _axis(_number(node, "axis"), len(x.shape))
    else:
        layer.num_elementwise_dims = _number(node, "batch_dims")
    return [out]


def _scatter_elements(w: Writer, node: ir.Node) -> list[Any]:
    """Write ScatterElements, which sets elements. Those that it sets twice must get the same number."""
    if "reduction" in node.attributes and node.attributes["reduction"].as_string() != "none":
        raise UnsupportedError(f"TensorRT: node {w.node!r} adds up what it scatters; please report this")
    x, indices, updates = (w.get(value) for value in node.inputs)
    layer = w.network.add_scatter(x, indices, updates, w.trt.ScatterMode.ELEMENT)
    out = w.out(layer)
    layer.axis = _axis(_number(node, "axis"), len(x.shape))
    return [out]


# --- linears


def _gemm(w: Writer, node: ir.Node) -> list[Any]:
    """Write Gemm: x @ W^T + bias."""
    if _number(node, "transA") or any(
        name in node.attributes and node.attributes[name].as_float() != 1 for name in ("alpha", "beta")
    ):
        raise UnsupportedError(f"TensorRT: node {w.node!r} is a Gemm with factors; please report this")
    kind = w.trt.MatrixOperation
    x, matrix = (w.get(value) for value in node.inputs[:2])
    turned = kind.TRANSPOSE if _number(node, "transB") else kind.NONE
    out = w.out(w.network.add_matrix_multiply(x, kind.NONE, matrix, turned))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        out = w.binary("SUM", out, w.get(node.inputs[2], 2))
    return [out]


def _quantize(w: Writer, node: ir.Node) -> list[Any]:
    """Write QuantizeLinear with one scale."""
    x, scale = (w.get(value) for value in node.inputs)
    return [w.out(w.network.add_quantize(x, scale, w.dtype(ir.DataType(_number(node, "output_dtype")))))]


def _dequantize(w: Writer, node: ir.Node) -> list[Any]:
    """Write DequantizeLinear of symmetric numbers, with one scale in all or per row."""
    x, scale = (w.get(value) for value in node.inputs[:2])
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        raise UnsupportedError(f"TensorRT: node {w.node!r} has zero points; quantise symmetrically")
    layer = w.network.add_dequantize(x, scale, scale.dtype)
    out = w.out(layer)
    if len(scale.shape):
        layer.axis = _axis(_number(node, "axis", 1), len(x.shape))
    return [out]


OPS: dict[str, Op] = {
    **{
        name: partial(_binary, operation)
        for name, operation in {
            "Add": "SUM", "Sub": "SUB", "Mul": "PROD", "Div": "DIV", "Pow": "POW", "And": "AND", "Or": "OR",
            "Less": "LESS", "Greater": "GREATER", "Max": "MAX", "Min": "MIN",
        }.items()
    },
    **{
        name: partial(_unary, operation)
        for name, operation in {
            "Exp": "EXP", "IsNaN": "ISNAN", "Log": "LOG", "Neg": "NEG", "Not": "NOT", "Reciprocal": "RECIP",
            "Sqrt": "SQRT",
        }.items()
    },
    **BITS,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumulative_sum,
    "DequantizeLinear": _dequantize,
    "Equal": _equal,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": partial(_gather_mode, "ELEMENT"),
    "GatherND": partial(_gather_mode, "ND"),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "QuantizeLinear": _quantize,
    "GreaterOrEqual": partial(_or_equal, "GREATER"),
    "LessOrEqual": partial(_or_equal, "LESS"),
    "Mod": _mod,
    "Pad": _pad,
    "Range": _range,
    "ReduceMax": partial(_reduce, "MAX"),
    "ReduceMean": partial(_reduce, "AVG"),
    "ReduceMin": partial(_reduce, "MIN"),
    "ReduceSum": partial(_reduce, "SUM"),
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}  # fmt: skip
"""ONNX op_type -> function that writes the operator."""
