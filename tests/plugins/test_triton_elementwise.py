"""silu_mul and rotate_heads in Triton's interpreter (make test runs it with TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton.elementwise import rotate_heads, silu_mul

from tests.plugins.heads import random_heads
from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from trtspec.ops import rotate_heads_inline, silu_mul_inline

DTYPES = st.sampled_from([torch.float32, torch.float16])
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3}  # exp to a few ulps of fp32; fp16 may round to the neighbour


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 5, 64, 1030]), st.integers(0, 3), DTYPES, st.booleans(), st.integers(0, 2**31))
def test_silu_mul_is_the_reference(size: int, rows: int, dtype: torch.dtype, slices: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * size + 3 * slices, generator=g).mul(5).to(dtype)[:, : 2 * size]
    tolerance = TOLERANCE[dtype]
    got = silu_mul(x)
    torch.testing.assert_close(got, silu_mul_inline(x), rtol=tolerance, atol=tolerance)
    for place in range(rows):
        assert torch.equal(silu_mul(x[place : place + 1]), got[place : place + 1])


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 100.0, -100.0])
def test_silu_of_numbers_at_the_ends(value: float) -> None:
    x = torch.tensor([[value, 1.0, 2.0, 3.0]])
    torch.testing.assert_close(silu_mul(x), silu_mul_inline(x), equal_nan=True)


@settings(deadline=None, max_examples=20)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 5)),
    st.sampled_from([2, 20, 64, 128, 256]),
    st.integers(0, 3),
    DTYPES,
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rotated_heads_have_the_reference_s_bits(
    heads: tuple[int, int], size: int, rows: int, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    x = random_heads(heads, size, rows, dtype, apart, seed)
    for got, wanted in zip(rotate_heads(*x), rotate_heads_inline(*x), strict=True):
        assert torch.equal(got, wanted)
