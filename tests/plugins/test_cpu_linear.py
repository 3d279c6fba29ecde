"""packed_linear in C++ is right, and has the reference's bits for integer weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plugins.packed_layers import (
    EPSILON,
    FP8,
    GROUPS,
    NONE,
    Layer,
    depths,
    dtypes,
    random_layer,
    random_rows,
    row_counts,
    widths,
)
from trtspec.ops import load_plugins, packed_linear
from trtspec.ops.linear import _reference, round_e4m3
from trtspec.ops.packing import pack_fp8, pack_int4, pack_int8, quantize_int4, quantize_int8

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)


@settings(max_examples=120, deadline=None)
@given(dtype=dtypes, rows=row_counts, depth=depths, width=widths, bias=st.booleans(), float_out=st.booleans())
def test_floating_point_weights_against_float64(
    dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool, float_out: bool
) -> None:
    """Results are within the error of K additions in fp32 and one rounding.

    Each addition has an error of at most half a unit of the sum so far.
    """
    layer, x = random_layer("panels", dtype, width, depth), random_rows(dtype, rows, depth)
    b = torch.randn(width).to(dtype) if bias else None
    exact, terms = x.double() @ layer.dense().T, x.double().abs() @ layer.dense().abs().T
    if b is not None:
        exact, terms = exact + b.double(), terms + b.double().abs()
    out = layer(x, b, float_out)
    assert out.dtype == (torch.float32 if float_out else dtype)
    assert out.shape == (rows, width)
    rounding = 0.0 if float_out else EPSILON[dtype]
    assert ((out.double() - exact).abs() <= (depth + 2) * 2**-24 * terms + rounding * exact.abs() + 1e-7).all()


@settings(max_examples=120, deadline=None)
@given(
    layout=st.sampled_from(FP8),
    dtype=dtypes,
    rows=row_counts,
    depth=depths,
    width=widths,
    bias=st.booleans(),
    float_out=st.booleans(),
)
def test_fp8_weights_against_float64(
    layout: str, dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool, float_out: bool
) -> None:
    """The bound of floating-point weights holds for x as torch casts it to e4m3."""
    layer, x = random_layer(layout, dtype, width, depth), random_rows(dtype, rows, depth)
    b = torch.randn(width).to(dtype) if bias else None
    read = x.double()
    if layer.x_scale is not None:
        read = (x.float() / layer.x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * layer.x_scale.double()
    exact, terms = read @ layer.dense().T, read.abs() @ layer.dense().abs().T
    if b is not None:
        exact, terms = exact + b.double(), terms + b.double().abs()
    for out in (layer(x, b, float_out), layer.reference(x, b, float_out)):
        assert out.dtype == (torch.float32 if float_out else dtype)
        rounding = 0.0 if float_out else EPSILON[dtype]
        bound = (depth + 4) * 2**-24 * terms + rounding * exact.abs() + 1e-7
        fits = exact.abs() + bound < torch.finfo(out.dtype).max  # float16 ends at 65504
        assert ((out.double() - exact).abs() <= bound)[fits].all()


@pytest.mark.parametrize("scale", [1.0, 0.013])
def test_x_is_rounded_as_torch_casts_it(scale: float) -> None:
    """x is rounded as torch casts it, which is read through a weight of 1.

    The numbers include ties, numbers below e4m3's normal ones, infinities and NaN.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * 10.0 ** torch.randint(-4, 4, (5000,), generator=generator)
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (finite[1:] + finite[:-1]) / 2 * scale
    x = torch.cat([x, ties, -ties, torch.tensor([1e30, float("inf"), float("-inf"), float("nan"), 465.0])])[:, None]
    x_scale = torch.tensor([scale])
    layer = Layer(*pack_fp8(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1)), NONE, 1, 1, x_scale)
    cast = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(round_e4m3(x, x_scale).nan_to_num(1e9), cast.nan_to_num(1e9))
    assert torch.equal(layer(x).nan_to_num(1e9), (cast * x_scale).nan_to_num(1e9))


@settings(max_examples=150, deadline=None)
@example(layout="int8", dtype=torch.float32, rows=3, depth=4097, width=33, bias=False, float_out=True)
@given(
    layout=st.sampled_from(["int8", *GROUPS]),
    dtype=dtypes,
    rows=row_counts,
    depth=depths,
    width=widths,
    bias=st.booleans(),
    float_out=st.booleans(),
)
def test_integer_weights_give_the_references_bits(
    layout: str, dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool, float_out: bool
) -> None:
    layer = random_layer(layout, dtype, width, depth)
    x, b = random_rows(dtype, rows, layer.in_features), torch.randn(width).to(dtype) if bias else None
    out = layer(x, b, float_out)
    assert out.dtype == (torch.float32 if float_out else dtype)
    assert torch.equal(out, layer.reference(x, b, float_out))


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_weights_of_other_makers(dtype: torch.dtype) -> None:
    """Weights that trtspec's own rounding never makes, but a quantised checkpoint may hold, have the reference's bits.

    These are -128, scales below fp16's normal numbers, and negative scales.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (40, 2048), generator=generator, dtype=torch.int8)
    values[0], values[1, ::2] = -128, -128
    eight = Layer(*pack_int8(values, torch.rand(40, generator=generator)), NONE, 40, 2048)
    scales = torch.randint(-1023, 1024, (40, 64), generator=generator) * 2.0**-24
    fours = (torch.randint(16, shape, generator=generator, dtype=torch.uint8) for shape in ((40, 2048), (40, 64)))
    four = Layer(*pack_int4(next(fours), scales, next(fours)), 40, 2048)
    grouped = Layer(*pack_int8(values, scales), NONE, 40, 2048)
    for layer in (eight, four, grouped):
        x = random_rows(dtype, 5, 2048)
        assert torch.equal(layer(x, float_out=True), layer.reference(x, float_out=True))


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_largest_integers(rows: int) -> None:
    """No partial sum is clamped where every product is at its limit, all of one sign or with opposed neighbours."""
    signs = torch.ones(rows, 512)
    signs[1::2, ::2], signs[2::3, 1::2], signs[3::4] = -1, -1, -1
    ends = torch.tensor([-128, 127], dtype=torch.int8)
    eight = ends[torch.arange(36)[:, None] // torch.tensor([[1, 2]]).repeat(1, 256) % 2]
    of_groups = [torch.ones(36, 512 // size) for size in (32, 64, 128)]
    layers = [Layer(*pack_int8(eight, scales), NONE, 36, 512) for scales in (torch.ones(36), *of_groups)]
    for value, zero in ((15, 0), (0, 15), (15, 15)):
        four = torch.full((36, 512), value, dtype=torch.uint8), torch.ones(36, 4)
        layers.append(Layer(*pack_int4(*four, torch.full((36, 4), zero, dtype=torch.uint8)), 36, 512))
    for layer in layers:
        assert torch.equal(layer(signs), layer.reference(signs))
        torch.testing.assert_close(layer(signs), (signs.double() @ layer.dense().T).float(), rtol=1e-5, atol=1e-3)


def test_the_deepest_int8_does_not_overflow() -> None:
    depth = 65536
    layer = Layer(*quantize_int8(torch.ones(1, depth)), NONE, 1, depth)
    x = torch.ones(2, depth)
    x[1] = -1
    torch.testing.assert_close(layer(x), torch.tensor([[depth], [-depth]], dtype=torch.float32), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(layout=st.sampled_from(["int8", *GROUPS]), dtype=dtypes, rows=st.integers(1, 5), depth=depths, width=widths)
def test_rounding_x_costs_half_a_step(layout: str, dtype: torch.dtype, rows: int, depth: int, width: int) -> None:
    """Each number of x is off by at most half its scale, amax / 127 / 2, against the dequantised matrix."""
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, rows, layer.in_features)
    dense = layer.dense()
    group = GROUPS.get(layout, layer.in_features)
    half_step = x.double().abs().unflatten(1, (-1, group)).amax(2) / 254  # [T, groups]
    bound = half_step @ dense.abs().unflatten(1, (-1, group)).sum(2).T
    terms = x.double().abs() @ dense.abs().T
    error = (layer(x, float_out=True).double() - x.double() @ dense.T).abs()
    assert (error <= bound + 1e-5 * terms + 1e-12).all()


@pytest.mark.parametrize(
    ("layout", "rounding_x", "all_rounding"),
    [("int8", 0.01, 0.015), ("int4-32", 0.008, 0.09), ("int4-128", 0.01, 0.12)],
)
def test_quantisation_error_of_normal_numbers(layout: str, rounding_x: float, all_rounding: float) -> None:
    """The root mean square error, relative to the results, is small.

    The bounds are for rounding x alone, and for rounding the weights as well.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 1024, generator=generator) for n in (513, 64))
    packed = (*quantize_int8(weight), NONE) if layout == "int8" else quantize_int4(weight, GROUPS[layout])
    layer = Layer(*packed, 513, 1024)
    exact = x.double() @ weight.double().T
    scale = exact.square().mean().sqrt()
    assert (layer(x) - x.double() @ layer.dense().T).square().mean().sqrt() < rounding_x * scale
    assert (layer(x) - exact).square().mean().sqrt() < all_rounding * scale


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-31, 1e30, 3e38])
@pytest.mark.parametrize("layout", ["int8", "int4-32", "int8-32"])
def test_tiny_and_huge_rows(layout: str, size: float) -> None:
    layer = random_layer(layout, torch.float32, 40, 64)
    x = torch.randn(3, 64).clamp(-1, 1) * size
    torch.testing.assert_close(layer(x), layer.reference(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_results_below_the_normal_numbers_are_the_references(rows: int, dtype: torch.dtype) -> None:
    """Results below the normal numbers are the reference's, next to a NaN, which stays one."""
    values, scales = torch.randint(-128, 128, (40, 64), dtype=torch.int8), torch.full((40,), 2.0**-120)
    scales[7] = float("nan")
    layer = Layer(*pack_int8(values, scales), NONE, 40, 64)
    out = layer(x := (torch.randn(rows, 64) * 2**-16).to(dtype))
    assert ((out != 0) & (out.abs() < torch.finfo(dtype).tiny)).any()
    torch.testing.assert_close(out, layer.reference(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["panels", "int8", "int4-32", "int8-32", *FP8])
def test_no_rows(layout: str) -> None:
    assert random_layer(layout, torch.float32, 40, 64)(torch.empty(0, 64)).shape == (0, 40)


@settings(max_examples=60, deadline=None)
@given(dtype=dtypes, rows=row_counts, depth=depths, width=widths, bias=st.booleans(), float_out=st.booleans())
def test_a_plain_weight_is_the_references(
    dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool, float_out: bool
) -> None:
    weight, x = torch.randn(width, depth).to(dtype), random_rows(dtype, rows, depth)
    b = torch.randn(width).to(dtype) if bias else None
    out = packed_linear(x, weight, b, float_out=float_out)
    reference = _reference(x, weight, NONE, NONE, b, None, width, float_out)
    assert out.dtype == reference.dtype
    assert torch.equal(out, reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3)}, "x is"),
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, "weight is|x is"),
        ({"x": torch.zeros(3, 60)}, "weight is"),
        ({"x": torch.zeros(3, 64, dtype=torch.bfloat16)}, "want the same type"),
        ({"out_features": 65}, "weight is"),
        ({"x": torch.zeros(3, 0), "weight": torch.zeros(40, 0)}, "x is"),
        ({"weight": torch.zeros(0, 64), "out_features": 0}, "x is"),
        ({"weight": torch.zeros(41, 64)}, "weight is"),
        ({"bias": torch.zeros(39)}, "bias is"),
        ({"bias": torch.zeros(40, dtype=torch.float16)}, "bias is"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    layer = random_layer("panels", torch.float32, 40, 64)
    arguments = {"x": torch.zeros(3, 64), "weight": layer.weight, "bias": None, "out_features": 40} | change
    with pytest.raises(RuntimeError, match=f"packed_linear: .*{message}"):
        packed_linear(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["int8", "int4-32", "int8-32", "fp8"])
def test_scales_and_zeros_that_do_not_fit_are_named(layout: str) -> None:
    layer, x = random_layer(layout, torch.float32, 41, 64), torch.zeros(3, 64)
    for scales in (NONE, layer.scales.to(torch.bfloat16), layer.scales[:1]):
        with pytest.raises(RuntimeError, match="packed_linear: scales is"):
            packed_linear(x, layer.weight, scales=scales, zeros=layer.zeros, out_features=41)
    with pytest.raises(RuntimeError, match="packed_linear: zeros is"):
        packed_linear(x, layer.weight, scales=layer.scales, zeros=torch.zeros(3), out_features=41)
    for x_scale in (torch.ones(2), torch.ones(1).half(), *([] if layout == "fp8" else [torch.ones(1)])):
        with pytest.raises(RuntimeError, match="packed_linear: x_scale is"):
            packed_linear(x, layer.weight, scales=layer.scales, zeros=layer.zeros, x_scale=x_scale, out_features=41)


@pytest.mark.parametrize("layout", ["panels", "int8", "int4-32", "int8-32", *FP8])
def test_opcheck(layout: str) -> None:
    layer = random_layer(layout, torch.float32, 40, 64)
    args = (torch.randn(3, 64), layer.weight, layer.scales, layer.zeros, torch.randn(40), layer.x_scale, 40, True)
    checks = ("test_faketensor",) if layout in FP8 else ("test_schema", "test_faketensor")  # test_schema adds in fp8
    torch.library.opcheck(torch.ops.trtspec.packed_linear.default, args, test_utils=checks)
