"""packed_linear in C++: a row has the same bits whatever rows are next to it and whichever thread multiplies it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.packed_layers import (
    EPSILON,
    FP8,
    GROUPS,
    Layer,
    depths,
    dtypes,
    layouts,
    random_layer,
    random_rows,
    widths,
)
from trtspec.ops import load_plugins

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("layout", ["panels", "int8", *GROUPS, *FP8])
@pytest.mark.parametrize(("width", "depth"), [(100, 768), (33, 1030)])
def test_a_row_has_the_same_bits_with_any_number_of_rows(
    layout: str, dtype: torch.dtype, width: int, depth: int
) -> None:
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, 200, layer.in_features)
    alone = torch.cat([layer(row, float_out=True) for row in x.split(1)])
    for rows in (*range(1, 41), 200):
        assert torch.equal(layer(x[:rows], float_out=True), alone[:rows]), rows


@pytest.mark.parametrize("rows", [2, 3, 17, 40])
def test_numbers_below_the_normal_ones_have_the_same_bits_with_any_number_of_rows(rows: int) -> None:
    layer = random_layer("panels", torch.bfloat16, 100, 1030)
    x = (torch.randn(rows, layer.in_features) * 2.0**-124).bfloat16()
    alone = torch.cat([layer(row, float_out=True) for row in x.split(1)])
    assert torch.equal(layer(x, float_out=True), alone)
    assert alone.any()


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    dtype=dtypes,
    depth=depths,
    width=widths,
    sizes=st.lists(st.integers(1, 14) | st.integers(1, 120), min_size=1, max_size=8),
)
def test_a_row_has_the_same_bits_in_every_chunk(
    layout: str, dtype: torch.dtype, depth: int, width: int, sizes: list[int]
) -> None:
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, sum(sizes), layer.in_features)
    assert torch.equal(torch.cat([layer(chunk) for chunk in x.split(sizes)]), layer(x))


@functools.cache
def wide_layer(layout: str) -> Layer:
    return random_layer(layout, torch.bfloat16, 1000, 768)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("layout", ["panels", "int8", *GROUPS, *FP8])
@pytest.mark.parametrize("rows", [1, 7, 13, 96, 97, 500])
def test_two_threads_give_the_bits_of_one(layout: str, rows: int) -> None:
    layer = wide_layer(layout)
    x = random_rows(torch.bfloat16, rows, layer.in_features)
    shared = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), shared)


@settings(max_examples=200, deadline=None)
@given(layout=layouts, dtype=dtypes, depth=depths, width=widths, rows=st.integers(1, 8))
def test_a_machine_that_reads_ahead_gives_the_same_bits(
    layout: str, dtype: torch.dtype, depth: int, width: int, rows: int
) -> None:
    """Bits are the same there, though products of few rows divide the panels into other pieces."""
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, rows, layer.in_features)
    before = torch.ops.trtspec_probe.set_machine_reads_ahead(True)
    try:
        streamed = layer(x)
        assert torch.ops.trtspec_probe.set_machine_reads_ahead(False)
        assert torch.equal(streamed, layer(x))
    finally:
        torch.ops.trtspec_probe.set_machine_reads_ahead(before)


@settings(max_examples=60, deadline=None)
@given(layout=layouts, dtype=dtypes, depth=depths, width=widths, rows=st.integers(1, 40))
def test_a_row_has_the_same_bits_in_every_memory_layout(
    layout: str, dtype: torch.dtype, depth: int, width: int, rows: int
) -> None:
    """A row has the same bits in a view: every other row, columns of a wider matrix, or columns that are apart."""
    layer = random_layer(layout, dtype, width, depth)
    x = random_rows(dtype, rows, layer.in_features)
    strided = torch.full((2 * rows, layer.in_features + 3), float("nan"), dtype=dtype)
    strided[::2, 1 : layer.in_features + 1] = x
    assert torch.equal(layer(strided[::2, 1 : layer.in_features + 1]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("layout", ["panels", "int8", *GROUPS, "fp8-static"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_number_of_poison_harms_its_row_alone(layout: str, dtype: torch.dtype, poison: float) -> None:
    layer = random_layer(layout, dtype, 96, 256)
    x = random_rows(dtype, 20, 256)
    clean = layer(x)
    x[4, 77] = poison
    out = layer(x)
    others = torch.arange(20) != 4
    assert torch.equal(out[others], clean[others])
    held = layout == "fp8-static" and poison == poison  # infinities are clamped to 448 steps
    assert held or not out[4].isfinite().any()
