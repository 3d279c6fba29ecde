"""PackedLinear and PackedEmbedding as standard ONNX, from every layout of ops.packing.

- Plain weights become Gemm with the matrix [N, K] as it is. For TensorRT, an lm_head in bf16 or fp16 stays a
  PackedLinear of x and the matrix, whose results are fp32. Gemm would round them to x's dtype.
- int8 and int4 for ONNX Runtime become MatMulNBits (com.microsoft), which rounds rows of x to int8 per block of inputs.
- int8 with a scale per output for TensorRT becomes DequantizeLinear and Gemm, with x as it is.
- int8 in groups and int4 for TensorRT become QuantizeGroups and GroupsLinear, which are plugins. They round x as the
  kernels of the other backends do. TensorRT's own layers take no 4-bit integers on a GPU.
- fp8 becomes DequantizeLinear and Gemm. Where x is rounded, x goes through QuantizeLinear and DequantizeLinear.

A packed matrix is unpacked here, at export, so files hold what the runtime reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.backends.sizes import LOGITS_DEPTH
from trtspec.errors import UnsupportedError
from trtspec.ops.packing import FLOATS, unpack_groups, unpack_values

_INT8_BLOCK = 32
"""Inputs of a block for MatMulNBits, which takes a scale per block even if a column has one scale for all inputs."""


def write_linears(model: ir.Model, runtime: str = "onnxruntime") -> None:
    """Rewrite, in place, each PackedLinear and PackedEmbedding for a runtime.

    runtime: "onnxruntime", "tensorrt" or "tensorrt_rtx". UnsupportedError for weights that the runtime does not take.
    """
    matrices = _RUNTIMES[runtime](model)
    rewrites: dict[str, Callable[[ir.Node], list[ir.Node]]] = {
        "PackedLinear": matrices.linear,
        "PackedEmbedding": matrices.embedding,
    }
    for node in list(model.graph):
        if node.op_type in rewrites and node.domain == "trtspec":
            written = rewrites[node.op_type](node)
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], written, node.outputs, written[-1].outputs
            )
    matrices.drop_unread()
    if any(node.domain == "com.microsoft" for node in model.graph):
        model.opset_imports["com.microsoft"] = 1


class _Matrices:
    """The constants of a model's linears. A constant derived from another is made once and named after it."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph

    def linear(self, node: ir.Node) -> list[ir.Node]:
        """Return nodes for PackedLinear(x, weight, scales?, zeros?, bias?, x_scale?); the last returns its result."""
        x, weight, scales, zeros, _, x_scale = (*node.inputs, *[None] * 4)[:6]
        assert x is not None
        assert weight is not None
        N, K = node.attributes["out_features"].as_int(), _depth(x)
        held = _tensor(weight)
        if held.dtype in FLOATS:
            matrix = weight
            if held.ndim != 2:
                matrix = self._constant(f"{weight.name}.matrix", lambda: unpack_values(held)[:N, :K].contiguous())
            return self.plain(node, matrix, held.dtype)
        assert scales is not None
        scale, zero = _tensor(scales), torch.empty(0) if zeros is None else _tensor(zeros)
        if held.dtype == torch.float8_e4m3fn:
            return self.fp8(node, held, scale, None if x_scale is None else _tensor(x_scale))
        return self.quantised(node, held, scale, zero)

    def plain(self, node: ir.Node, matrix: ir.Value, dtype: torch.dtype) -> list[ir.Node]:
        """Return Gemm with a matrix [N, K] of floats."""
        x, bias = node.inputs[0], (*node.inputs, *[None] * 3)[4]
        out = ir.node("Gemm", [x, matrix, bias] if bias is not None else [x, matrix], {"transB": 1})
        return [out, *self._as_float(node, out, dtype)]

    def fp8(self, node: ir.Node, held: Tensor, scale: Tensor, x_scale: Tensor | None) -> list[ir.Node]:
        """Return DequantizeLinear of [N, K], with one scale or, if scales differ, one per row, and Gemm in x's dtype.

        If there is an x_scale, x is first rounded to multiples of it. Scales are rounded to x's dtype, as the operators
        require.
        """
        x, weight, bias = node.inputs[0], node.inputs[1], (*node.inputs, *[None] * 3)[4]
        assert x is not None
        assert weight is not None
        N, K, dtype = node.attributes["out_features"].as_int(), _depth(x), _TORCH[x.dtype]
        columns = scale.flatten()[:N]
        single = bool((columns == columns[0]).all())
        matrix = self._constant(f"{weight.name}.matrix", lambda: unpack_values(held)[:N, :K])
        scales = self._constant(
            f"{weight.name}.scales", lambda: _rounded(columns[0] if single else columns, dtype, weight.name)
        )
        written = []
        if x_scale is not None:
            step = self._constant(f"{weight.name}.x_scale", lambda: _rounded(x_scale[0], dtype, weight.name))
            eighths = ir.node("QuantizeLinear", [x, step], {"output_dtype": ir.DataType.FLOAT8E4M3FN})
            back = ir.node("DequantizeLinear", [eighths.outputs[0], step])
            written, x = [eighths, back], back.outputs[0]
        whole = ir.node("DequantizeLinear", [matrix, scales], {} if single else {"axis": 0})
        out = ir.node("Gemm", [x, whole.outputs[0], *([] if bias is None else [bias])], {"transB": 1})
        return [*written, whole, out, *self._as_float(node, out, dtype)]

    def _as_float(self, node: ir.Node, out: ir.Node, dtype: torch.dtype) -> list[ir.Node]:
        """Return the cast to fp32 after a linear that computes in `dtype`, or no node if it is not needed."""
        if node.attributes["float_out"].as_int() and dtype != torch.float32:
            return [ir.node("Cast", [out.outputs[0]], {"to": ir.DataType.FLOAT})]
        return []

    def quantised(self, node: ir.Node, held: Tensor, scale: Tensor, zero: Tensor) -> list[ir.Node]:
        """Return the nodes of a linear with int8 or int4 weights, for ONNX Runtime."""
        x, weight, bias = node.inputs[0], node.inputs[1], (*node.inputs, None, None, None)[4]
        assert x is not None
        assert weight is not None
        N, K = node.attributes["out_features"].as_int(), _depth(x)
        parts: Callable[[], tuple[Tensor, Tensor, Tensor]]
        if held.dtype == torch.int8:
            block = K // scale.shape[1] if scale.ndim == 3 else _INT8_BLOCK
            bits, parts = 8, lambda: _eight_bits(held, scale, N, K, block)
        else:
            bits, block, parts = 4, K // scale.shape[1], lambda: _four_bits(held, scale, zero, N)
        names = [f"{weight.name}.{part}" for part in ("blocks", "scales", "zeros")]
        if names[0] not in self.graph.initializers:
            for name, tensor in zip(names, parts(), strict=True):
                self._register(name, tensor)
        inputs = [x, *(self.graph.initializers[name] for name in names)]
        attributes = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": 4}
        out = ir.Node("com.microsoft", "MatMulNBits", inputs, [ir.AttrInt64(k, v) for k, v in attributes.items()])
        if bias is not None:
            return [out, ir.node("Add", [out.outputs[0], bias])]
        return [out]

    def embedding(self, node: ir.Node) -> list[ir.Node]:
        """Return the Gather that replaces PackedEmbedding(ids, weight, ...)."""
        ids, weight = node.inputs[:2]
        assert weight is not None
        held, K = _tensor(weight), node.attributes["in_features"].as_int()
        if held.dtype not in FLOATS:
            raise UnsupportedError(
                f"{weight.name}: an embedding of quantised numbers is not built for ONNX; untie the lm_head"
            )
        matrix = weight
        if held.ndim != 2:
            rows = self._rows(weight)
            matrix = self._constant(f"{weight.name}.matrix", lambda: unpack_values(held)[:rows, :K].contiguous())
        return [ir.node("Gather", [matrix, ids], {"axis": 0})]

    def _rows(self, weight: ir.Value) -> int:
        """N of a packed matrix, from the linear that shares it if there is one."""
        for use in weight.uses():
            if use.node.op_type == "PackedLinear":
                return int(use.node.attributes["out_features"].as_int())
        return unpack_values(_tensor(weight)).shape[0]

    def _constant(self, name: str, make: Callable[[], Tensor]) -> ir.Value:
        if name not in self.graph.initializers:
            self._register(name, make())
        return self.graph.initializers[name]

    def _register(self, name: str, made: Tensor) -> None:
        self._register_tensor(name, ir.tensor(made.contiguous(), name=name))

    def _register_tensor(self, name: str, tensor: ir.TensorProtocol) -> None:
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)

    def drop_unread(self) -> None:
        """Remove constants that no node reads any more."""
        for name, value in list(self.graph.initializers.items()):
            if not value.uses():
                del self.graph.initializers[name]


class _TensorRTMatrices(_Matrices):
    """The constants of a model's linears, in the form for TensorRT."""

    def plain(self, node: ir.Node, matrix: ir.Value, dtype: torch.dtype) -> list[ir.Node]:
        """Return Gemm or, where the plugin LinearLogits serves and results are fp32, PackedLinear(x, matrix)."""
        x, bias = node.inputs[0], (*node.inputs, *[None] * 3)[4]
        assert x is not None
        wide = node.attributes["float_out"].as_int() and dtype != torch.float32
        if not wide or bias is not None or _depth(x) % LOGITS_DEPTH:
            return super().plain(node, matrix, dtype)
        return [ir.node("PackedLinear", [x, matrix], domain="trtspec")]

    def quantised(self, node: ir.Node, held: Tensor, scale: Tensor, zero: Tensor) -> list[ir.Node]:
        """Return DequantizeLinear of [N, K] in x's dtype and Gemm for int8 with one scale per row; else `in_groups`.

        Scales are rounded to x's dtype. A scale of 0, for a row of zeros, becomes 1, because TensorRT requires positive
        scales.
        """
        if scale.ndim == 3:
            return self.in_groups(node, held, scale, zero)
        x, weight, bias = node.inputs[0], node.inputs[1], (*node.inputs, None, None, None)[4]
        assert x is not None
        assert weight is not None
        N, K = node.attributes["out_features"].as_int(), _depth(x)
        dtype = _TORCH[x.dtype]
        matrix, scales = f"{weight.name}.matrix", f"{weight.name}.scales"
        if matrix not in self.graph.initializers:
            self._register(matrix, unpack_values(held)[:N, :K].contiguous())
            self._register_scales(scales, scale.flatten()[:N], dtype)
        whole = ir.node(
            "DequantizeLinear", [self.graph.initializers[matrix], self.graph.initializers[scales]], {"axis": 0}
        )
        inputs = [x, whole.outputs[0], *([] if bias is None else [bias])]
        out = ir.node("Gemm", inputs, {"transB": 1})
        return [whole, out, *self._as_float(node, out, dtype)]

    def in_groups(self, node: ir.Node, held: Tensor, scale: Tensor, zero: Tensor) -> list[ir.Node]:
        """Return QuantizeGroups(x) and GroupsLinear, with the weights as they are packed, four bytes to a number."""
        x, weight, bias = node.inputs[0], node.inputs[1], (*node.inputs, None, None, None)[4]
        assert x is not None
        assert weight is not None
        N, groups, bits = node.attributes["out_features"].as_int(), scale.shape[1], 8 if held.dtype == torch.int8 else 4

        def points() -> Tensor:
            given = zero if zero.numel() else torch.full(scale.shape, 8, dtype=torch.uint8)
            return _words(given[: None if bits == 4 else 1])

        constants = [
            self._constant(f"{weight.name}.panels", lambda: _words(held.flatten(2))),
            self._constant(f"{weight.name}.scales", lambda: scale),
            self._constant(f"{weight.name}.zeros", points),
            bias or self._constant(f"{weight.name}.bias", lambda: torch.zeros(N, dtype=_TORCH[x.dtype])),
        ]
        assert x.shape is not None
        rounded = ir.node("QuantizeGroups", [x], {"group": _depth(x) // groups}, domain="trtspec", num_outputs=3)
        sizes = (_depth(x) // 4, groups, groups)
        kinds = (ir.DataType.INT32, ir.DataType.FLOAT, ir.DataType.INT32)
        for value, size, kind in zip(rounded.outputs, sizes, kinds, strict=True):
            value.shape, value.type = ir.Shape([x.shape[0], size]), ir.TensorType(kind)
        out = ir.node("GroupsLinear", [x, *rounded.outputs, *constants], {"bits": bits}, domain="trtspec")
        return [rounded, out, *self._as_float(node, out, _TORCH[x.dtype])]

    def _register_scales(self, name: str, scale: Tensor, dtype: torch.dtype) -> None:
        rounded = _rounded(scale, dtype, name)
        scale = torch.where(scale == 0, torch.ones_like(rounded), rounded).contiguous()
        self._register_tensor(name, ir.tensor(scale, name=name))


class _OwnLayersMatrices(_TensorRTMatrices):
    """The same for networks without plugins. An lm_head in bf16 or fp16 is Gemm, which rounds logits to its dtype."""

    def plain(self, node: ir.Node, matrix: ir.Value, dtype: torch.dtype) -> list[ir.Node]:
        return _Matrices.plain(self, node, matrix, dtype)

    def in_groups(self, node: ir.Node, held: Tensor, scale: Tensor, zero: Tensor) -> list[ir.Node]:
        raise UnsupportedError(
            "TensorRT-RTX has no layers for weights with a scale per group of inputs; use quantization int8, or none"
        )


_RUNTIMES: dict[str, type[_Matrices]] = {
    "onnxruntime": _Matrices, "tensorrt": _TensorRTMatrices, "tensorrt_rtx": _OwnLayersMatrices,
}  # fmt: skip
_TORCH = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


def _eight_bits(held: Tensor, scales: Tensor, N: int, K: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Convert int8 panels, and scales per column or block, to MatMulNBits' B, scales and zero points per block."""
    values = F.pad(unpack_values(held)[:N, :K], (0, -K % block))
    blocks = values.shape[1] // block
    unsigned = (values.to(torch.int16) + 128).to(torch.uint8).view(N, blocks, block)
    columns = scales.flatten()[:, None] if scales.ndim == 2 else unpack_groups(held, scales, torch.empty(0))[0]
    per_block = columns[:N].expand(N, blocks).contiguous()
    return unsigned, per_block, torch.full((N, blocks), 128, dtype=torch.uint8)


def _four_bits(held: Tensor, scales: Tensor, zeros: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Convert int4 panels, and scales and zeros of groups, to MatMulNBits' B, scales and zero points."""
    scale, zero = (part[:N] for part in unpack_groups(held, scales, zeros))  # [N, K/g]
    values = unpack_values(held)[:N].view(N, scale.shape[1], -1)
    zero = F.pad(zero.to(torch.uint8), (0, scale.shape[1] % 2))
    return _pairs(values), scale.contiguous(), _pairs(zero)


def _pairs(values: Tensor) -> Tensor:
    """Pack uint8 values 0..15 [..., n] two to a byte, the first in the low half: [..., n / 2]."""
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous()


def _words(octets: Tensor) -> Tensor:
    """Return bytes [..., n], four to an int32: [..., n / 4]."""
    return octets.reshape(-1).view(torch.int32).view(*octets.shape[:-1], -1)


def _rounded(scale: Tensor, dtype: torch.dtype, name: str | None) -> Tensor:
    """Round scales to x's dtype, but none to 0. UnsupportedError if errors are too large, as for extreme ones in fp16.

    An error may be large next to its own scale if it is small next to the largest: that row has next to no weight.
    """
    limits = torch.finfo(dtype)
    rounded = scale.to(dtype)
    rounded = torch.where((rounded == 0) & (scale > 0), limits.smallest_normal * limits.eps, rounded.float()).to(dtype)
    if ((rounded.float() - scale).abs() > torch.maximum(scale * 2.0**-8, scale.max() * 2.0**-16)).any():
        raise UnsupportedError(f"{name}: its scales do not fit {dtype}; use dtype bfloat16 or float32")
    return rounded


def _depth(x: ir.Value) -> int:
    assert x.shape is not None
    size = x.shape[-1]
    assert isinstance(size, int)
    return size


def _tensor(value: ir.Value) -> Tensor:
    assert value.const_value is not None
    return as_torch(value.const_value)


def as_torch(held: ir.TensorProtocol) -> Tensor:
    """Return a constant as a torch tensor of its shape and dtype, over the same memory.

    For a weight of the step, this is the memory of the step's own tensor.
    """
    raw = getattr(held, "raw", None)
    return raw.detach() if isinstance(raw, Tensor) else torch.from_numpy(np.asarray(held.numpy()))
