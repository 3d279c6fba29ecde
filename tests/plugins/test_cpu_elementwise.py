"""rms_norm, silu_mul, rotate_heads and packed_swiglu in C++ against the references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.plugins.heads import random_heads
from tests.plugins.packed_layers import EPSILON, Layer, dtypes, layouts, random_layer, random_rows
from trtspec.ops import (
    load_plugins,
    packed_swiglu,
    rms_norm,
    rms_norm_inline,
    rotate_heads,
    rotate_heads_inline,
    silu_mul,
    silu_mul_inline,
)

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

sizes = st.sampled_from([1, 5, 15, 16, 64, 65, 300, 576, 1030])
seeds = st.integers(0, 2**31)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A few ulps of fp32. In fewer bits a result may round to the neighbour, twice."""
    error = 4e-6 if dtype == torch.float32 else 2.1 * 2 * EPSILON[dtype]
    return {"rtol": error, "atol": 4e-6}


def each_row_alone(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([op(x[row : row + 1]) for row in range(x.shape[0])])


@settings(deadline=None, max_examples=60)
@given(sizes, st.lists(st.integers(1, 4), min_size=1, max_size=2), dtypes, st.sampled_from([1e-6, 0.5]), seeds)
def test_rms_norm_is_the_reference(size: int, rows: list[int], dtype: torch.dtype, eps: float, seed: int) -> None:
    """Rows lie next to each other, or are slices of longer ones, such as heads in a row of q, k and v."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, size + seed % 2 * 3, generator=g).mul(3).to(dtype)[..., :size]
    weight = torch.randn(size, generator=g).to(dtype)
    got = rms_norm(x, weight, eps)
    torch.testing.assert_close(got, rms_norm_inline(x, weight, eps), **tolerance(dtype))
    assert torch.equal(got, each_row_alone(lambda row: rms_norm(row, weight, eps), x))


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 9), dtypes, seeds)
def test_silu_mul_is_the_reference(size: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * size + seed % 2 * 3, generator=g).mul(5).to(dtype)[:, : 2 * size]
    got = silu_mul(x)
    torch.testing.assert_close(got, silu_mul_inline(x), **tolerance(dtype))
    if rows:
        assert torch.equal(got, each_row_alone(silu_mul, x))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 100.0, -100.0, 0.0])
@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
def test_silu_of_numbers_at_the_ends(value: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[value, 1.0, 2.0, 3.0]], dtype=dtype)
    torch.testing.assert_close(silu_mul(x), silu_mul_inline(x), equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 3)),
    st.sampled_from([2, 20, 32, 64, 100, 128]),
    st.integers(0, 5),
    dtypes,
    st.booleans(),
    seeds,
)
def test_rotated_heads_have_the_reference_s_bits(
    heads: tuple[int, int], size: int, rows: int, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    x = random_heads(heads, size, rows, dtype, apart, seed)
    for got, wanted in zip(rotate_heads(*x), rotate_heads_inline(*x), strict=True):
        assert torch.equal(got, wanted)


def swiglu(layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return packed_swiglu(x, layer.weight, bias, layer.scales, layer.zeros, layer.x_scale, layer.out_features)


@settings(deadline=None, max_examples=60)
@given(
    layouts,
    dtypes,
    st.sampled_from([64, 128, 320, 100, 66]),
    st.sampled_from([16, 128, 576, 1030]),
    st.integers(1, 40) | st.sampled_from([96, 97, 200]),
    st.booleans(),
)
def test_packed_swiglu_has_the_bits_of_two_ops(
    layout: str, dtype: torch.dtype, width: int, depth: int, rows: int, has_bias: bool
) -> None:
    """Gates and ups are whole panels of columns, or end within one."""
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, rows, layer.in_features)
    bias = torch.randn(width).to(dtype) if has_bias else None
    # fp16 overflows
    torch.testing.assert_close(swiglu(layer, x, bias), silu_mul(layer(x, bias)), rtol=0, atol=0, equal_nan=True)


def test_packed_swiglu_takes_a_plain_weight() -> None:
    weight, x = torch.randn(20, 24), torch.randn(3, 24)
    none = torch.empty(0)
    got = packed_swiglu(x, weight, None, none, none, None, 20)
    torch.testing.assert_close(got, silu_mul_inline(x @ weight.T))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [7, 97, 500])
def test_two_threads_give_the_bits_of_one(rows: int) -> None:
    layer = random_layer("panels", torch.bfloat16, 1024, 512)
    x = random_rows(torch.bfloat16, rows, 512)
    weight = random_rows(torch.bfloat16, 1, 512)[0]
    heads, (cos, sin) = x.view(rows, 8, 64), torch.randn(2, rows, 1, 64).bfloat16()

    def results() -> list[Tensor]:
        return [rms_norm(x, weight, 1e-5), silu_mul(x), swiglu(layer, x), *rotate_heads(heads, heads, cos, sin)]

    shared = results()
    torch.set_num_threads(1)
    assert all(map(torch.equal, shared, results()))


HEADS, ANGLES = torch.ones(2, 3, 8), torch.ones(2, 1, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5), r"weight is \[9\] Float; want \[8\] of x's type"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(8).half(), 1e-5), "weight is .* of x's type, Float"),
        (lambda: rms_norm(torch.ones(1, 8).double(), torch.ones(8).double(), 1e-5), "x is Double; want float32"),
        (lambda: silu_mul(torch.ones(2, 7)), r"x is \[2, 7\]; want \[rows, 2 \* size\]"),
        (lambda: rotate_heads(HEADS[..., :7], HEADS[..., :7], ANGLES, ANGLES), "an even size"),
        (lambda: rotate_heads(HEADS, HEADS[:1], ANGLES, ANGLES), r"k is \[1, 3, 8\]"),
        (lambda: rotate_heads(HEADS, HEADS, ANGLES, ANGLES[:, 0]), r"sin is \[2, 8\]"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
