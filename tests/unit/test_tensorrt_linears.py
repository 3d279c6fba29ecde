"""Linears as TensorRT layers: every layout of weights, computed through the stand-in's layers."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from tests.fake_tensorrt.builder import FakeTensorRT
from tests.fake_tensorrt.network import FakeNetwork
from tests.fake_tensorrt.plugins import fake_plugin_of
from trtspec.backends.onnx.export import OPS, _translation, node_type
from trtspec.backends.onnx.linear import write_linears
from trtspec.backends.tensorrt.network import write_network
from trtspec.errors import UnsupportedError
from trtspec.ops import packed_linear
from trtspec.ops.linear import round_e4m3
from trtspec.ops.packing import pack_fp8, pack_int8, pack_panels, quantize_int4, quantize_int8, unpack

N, K, GROUP = 40, 64, 32
DTYPES = {torch.float32: ir.DataType.FLOAT, torch.bfloat16: ir.DataType.BFLOAT16}
ALL_DTYPES = {**DTYPES, torch.float16: ir.DataType.FLOAT16}


for op in OPS:  # registers the nodes, as an export does
    _translation(node_type(op), getattr(torch.ops.trtspec, op).default._schema)


def constant(name: str, tensor: Tensor) -> ir.Value:
    held = ir.tensor(tensor, name=name)
    return ir.Value(name=name, shape=held.shape, type=ir.TensorType(held.dtype), const_value=held)


def linear(
    dtype: torch.dtype, weight: tuple[Tensor, ...], bias: Tensor | None, float_out: bool, x_scale: Tensor | None = None
) -> FakeNetwork:
    """The network that takes x [rows, K] through one PackedLinear."""
    x = ir.Value(name="x", shape=ir.Shape(["rows", K]), type=ir.TensorType(ALL_DTYPES[dtype]))
    names = ("step.weight", "step.scales", "step.zeros")
    held = [constant(name, part) if part.numel() else None for name, part in zip(names, weight, strict=False)]
    held += [None] * (3 - len(held))
    if bias is not None or x_scale is not None:
        held.append(None if bias is None else constant("bias", bias))
    if x_scale is not None:
        held.append(constant("x_scale", x_scale))
    attributes = {"out_features": N, "float_out": int(float_out)}
    node = ir.Node("trtspec", "PackedLinear", [x, *held], [ir.AttrInt64(k, v) for k, v in attributes.items()])
    node.outputs[0].name = "out"
    constants = [value for value in held if value is not None]
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=constants, opset_imports={"": 21, "trtspec": 1})
    model = ir.Model(graph, ir_version=10)
    write_linears(model, "tensorrt")
    network = FakeNetwork()
    network._kept = write_network(FakeTensorRT(), network, model, fake_plugin_of)
    network._check()
    return network


def layouts(kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(N, K, generator=g)
    if kind == "int8":
        matrix[3] = 0  # a row whose scale is 0
        return quantize_int8(matrix)
    if kind in ("fp8", "fp8_columns"):
        scales = torch.rand(N, generator=g) + 0.1 if kind == "fp8_columns" else torch.full((N,), 0.3)
        return pack_fp8(matrix.to(torch.float8_e4m3fn), scales)
    if kind == "symmetric":
        return quantize_int4(matrix, GROUP, symmetric=True)
    return (matrix.to(dtype),) if kind == "plain" else (pack_panels(matrix.to(dtype)),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "panels", "int8", "fp8", "fp8_columns"])
@pytest.mark.parametrize(("biased", "float_out"), [(False, False), (True, False), (False, True)])
def test_a_linear_is_the_product_with_its_matrix(kind: str, dtype: torch.dtype, biased: bool, float_out: bool) -> None:
    weight = layouts(kind, dtype)
    bias = torch.linspace(-1, 1, N).to(dtype) if biased else None
    network = linear(dtype, weight, bias, float_out)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    none = torch.empty(0)
    parts = (*weight, none, none)[:3]
    expected = x.float() @ unpack(*parts, N, K).T + (0 if bias is None else bias.float())
    got = network._run({"x": x})["out"]
    assert got.dtype == (torch.float32 if float_out else dtype)
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.3}
    torch.testing.assert_close(got.float(), expected, **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "panels"])
def test_logits_are_not_rounded_to_the_model_s_dtype(kind: str, dtype: torch.dtype) -> None:
    """Logits of an lm_head have the bits of sums in fp32; a Gemm would leave 8 or 11 of them."""
    weight = layouts(kind, dtype)
    network = linear(dtype, weight, None, True)
    assert [layer._cls for layer in network._layers if layer._cls != "IConstantLayer"] == ["IPluginV3Layer"]
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = network._run({"x": x})["out"]
    exact = x.float() @ unpack(*weight, *[torch.empty(0)] * 2, N, K).T
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, got.to(dtype).float())


@pytest.mark.parametrize("kind", ["fp8", "fp8_columns"])
@pytest.mark.parametrize("biased", [False, True])
def test_what_fp8_weights_multiply_is_rounded(kind: str, biased: bool) -> None:
    """x is rounded to multiples of x_scale, and some of it is clamped.

    The network has one layer that quantises x, and two that undo a quantisation.
    """
    weight, x_scale = layouts(kind, torch.float32), torch.tensor([0.005])
    bias = torch.linspace(-1, 1, N) if biased else None
    network = linear(torch.float32, weight, bias, False, x_scale)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    assert (x.abs() > 448 * 0.005).any()
    expected = (round_e4m3(x, x_scale) * x_scale) @ unpack(*weight, torch.empty(0), N, K).T
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(network._run({"x": x})["out"], expected, rtol=1e-5, atol=1e-4)
    assert [layer._cls for layer in network._layers if "quantize" in layer._cls.lower()] == [
        "IQuantizeLayer", "IDequantizeLayer", "IDequantizeLayer",
    ]  # fmt: skip
    assert {"step.weight.matrix", "step.weight.scales", "step.weight.x_scale"} <= set(network._weights)


def test_a_row_with_next_to_no_weight_is_no_reason_to_refuse() -> None:
    matrix = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    for row, factor in ((3, 1e-3), (4, 1e-5), (5, 1e-9), (6, 0)):
        matrix[row] *= factor
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).half()
    got = linear(torch.float16, quantize_int8(matrix), None, True)._run({"x": x})["out"]
    torch.testing.assert_close(got, x.float() @ matrix.T, rtol=0.02, atol=0.3)
    assert got[:, 3:7].abs().max() < 0.1


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_scales_that_fp16_lacks_are_refused(kind: str) -> None:
    if kind == "fp8":
        weight = pack_fp8(torch.ones(N, K).to(torch.float8_e4m3fn), torch.full((N,), 1e-7))
    else:
        weight = quantize_int8(torch.full((N, K), 1e-7))
    with pytest.raises(UnsupportedError, match=r": its scales do not fit torch\.float16; use dtype bfloat16"):
        linear(torch.float16, weight, None, False)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int8 groups", "symmetric", "zero points"])
@pytest.mark.parametrize("biased", [False, True])
def test_products_in_groups_have_the_op_s_bits(kind: str, dtype: torch.dtype, biased: bool) -> None:
    """Two plugins, which round x as the op does."""
    g = torch.Generator().manual_seed(0)
    if kind == "int8 groups":
        values = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
        weight = (*pack_int8(values, torch.rand(N, K // GROUP, generator=g)), torch.empty(0, dtype=torch.uint8))
    else:
        weight = quantize_int4(torch.randn(N, K, generator=g).abs(), GROUP, symmetric=kind == "symmetric")
    bias = torch.randn(N, generator=g).to(dtype) if biased else None
    network = linear(dtype, weight, bias, False)
    layers = [layer._cls for layer in network._layers if layer._cls != "IConstantLayer"]
    assert layers == ["IPluginV3Layer"] * 2
    x = torch.randn(5, K, generator=g).to(dtype)
    wanted = packed_linear(x, weight[0], bias, scales=weight[1], zeros=weight[2], out_features=N)
    assert torch.equal(network._run({"x": x})["out"], wanted)


@pytest.mark.parametrize("kind", ["int8", "symmetric"])
def test_weights_are_named_for_a_refit(kind: str) -> None:
    network = linear(torch.float32, layouts(kind, torch.float32), None, False)
    assert {f"step.weight.{'matrix' if kind == 'int8' else 'panels'}", "step.weight.scales"} <= set(network._weights)
