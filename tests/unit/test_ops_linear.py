"""packed_linear is right, and a row has the same bits whatever is computed with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import packed_linear

EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
dtypes = st.sampled_from(list(EPSILON))
# Sizes include depths that do not fill a cache line, and weights so small that torch takes another path for few rows.
depths = st.sampled_from([1, 3, 7, 16, 20, 64, 127, 130, 256, 1000]) | st.integers(1, 300)
widths = st.sampled_from([1, 2, 5, 8, 15, 17, 64, 130, 512]) | st.integers(1, 200)


Layer = tuple[Tensor, Tensor, "Tensor | None"]


def random_layer(dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool) -> Layer:
    """Return x, weight and, if wanted, bias."""
    g = torch.Generator().manual_seed(rows * depth + width)
    x = torch.randn(rows, depth, generator=g).to(dtype)
    weight = torch.randn(width, depth, generator=g).to(dtype)
    return x, weight, torch.randn(width, generator=g).to(dtype) if bias else None


def cancelling_layer(dtype: torch.dtype, rows: int, depth: int, width: int) -> tuple[Tensor, Tensor]:
    """x and weight whose products cancel in pairs.

    What is left shows the order of the additions. It does so in half precision, too, where rounding the result would
    otherwise hide it.
    """
    x, weight, _ = random_layer(dtype, rows, depth, width, False)
    half = depth // 2
    x[:, half : 2 * half] = x[:, :half].flip(1)
    weight[:, half : 2 * half] = -weight[:, :half].flip(1)
    return x, weight


@settings(max_examples=100, deadline=None)
@given(dtype=dtypes, rows=st.integers(0, 70), depth=depths, width=widths, bias=st.booleans())
def test_against_float64(dtype: torch.dtype, rows: int, depth: int, width: int, bias: bool) -> None:
    x, weight, b = random_layer(dtype, rows, depth, width, bias)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T  # rounding errors are relative to the terms, not the sum
    if b is not None:
        exact, scale = exact + b.double(), scale + b.double().abs()
    out = packed_linear(x, weight, b)
    assert out.dtype == dtype
    assert out.shape == (rows, width)
    error = (out.double() - exact).abs()
    assert (error <= 2e-6 * scale + EPSILON[dtype] * exact.abs() + 1e-6).all()


@settings(max_examples=150, deadline=None)
@given(
    dtype=dtypes,
    depth=depths,
    width=widths,
    sizes=st.lists(st.integers(1, 9) | st.integers(1, 200), min_size=1, max_size=12),
)
def test_a_row_has_the_same_bits_in_every_chunk(dtype: torch.dtype, depth: int, width: int, sizes: list[int]) -> None:
    x, weight = cancelling_layer(dtype, sum(sizes), depth, width)
    chunked = [packed_linear(chunk, weight) for chunk in x.split(sizes)]
    assert torch.equal(torch.cat(chunked), packed_linear(x, weight))


@settings(max_examples=50, deadline=None)
@given(dtype=dtypes, depth=depths, width=widths, rows=st.integers(2, 40))
def test_a_row_has_the_same_bits_alone_with_bias(dtype: torch.dtype, depth: int, width: int, rows: int) -> None:
    x, weight, bias = random_layer(dtype, rows, depth, width, True)
    alone = [packed_linear(row, weight, bias) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), packed_linear(x, weight, bias))


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize(("depth", "width"), [(896, 256), (256, 2048), (4864, 64)])
def test_a_row_has_the_same_bits_alone_in_real_shapes(dtype: torch.dtype, depth: int, width: int) -> None:
    """One row has the same bits alone and among M rows, for each M that a step of small batches has."""
    x, weight = cancelling_layer(dtype, 130, depth, width)
    alone = torch.cat([packed_linear(row, weight) for row in x[:20].split(1)])
    for rows in (*range(2, 21), 31, 32, 33, 64, 100, 128, 130):
        assert torch.equal(packed_linear(x[:rows], weight)[:20], alone[:rows]), rows


@settings(max_examples=30, deadline=None)
@given(dtype=dtypes, depth=depths, width=widths, order=st.permutations(range(23)))
def test_a_row_has_the_same_bits_in_every_place(dtype: torch.dtype, depth: int, width: int, order: list[int]) -> None:
    x, weight = cancelling_layer(dtype, 23, depth, width)
    assert torch.equal(packed_linear(x[order], weight), packed_linear(x, weight)[order])


@settings(max_examples=30, deadline=None)
@example(dtype=torch.float32, depth=256, width=1, rows=24)
@given(dtype=dtypes, depth=depths, width=widths, rows=st.integers(2, 40))
def test_a_row_has_the_same_bits_in_every_memory_layout(dtype: torch.dtype, depth: int, width: int, rows: int) -> None:
    """Rows may be a view: every other row, columns of a wider matrix, not aligned."""
    x, weight = cancelling_layer(dtype, rows, depth, width)
    strided = torch.zeros(2 * rows, depth + 3, dtype=dtype)
    strided[::2, 1 : depth + 1] = x
    assert torch.equal(packed_linear(strided[::2, 1 : depth + 1], weight), packed_linear(x, weight))


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_of_poison_harms_nobody(dtype: torch.dtype, poison: float) -> None:
    x, weight, bias = random_layer(dtype, 10, 64, 96, True)
    clean = packed_linear(x, weight, bias)
    x[4] = poison
    others = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    out = packed_linear(x, weight, bias)
    assert torch.equal(out[others], clean[others])
    assert not out[4].isfinite().any()


def test_bias_is_optional() -> None:
    x, weight, bias = random_layer(torch.float32, 5, 32, 16, True)
    torch.testing.assert_close(packed_linear(x, weight) + bias, packed_linear(x, weight, bias))


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool) -> None:
    x, weight, b = random_layer(torch.float32, 3, 32, 16, bias)
    args = (x, weight, x.new_empty(0), x.new_empty(0), b, None, 16, False)
    torch.library.opcheck(torch.ops.trtspec.packed_linear.default, args, test_utils=("test_schema", "test_faketensor"))
