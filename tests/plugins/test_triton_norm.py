"""rms_norm in Triton's interpreter (make test runs it with TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton.norm import rms_norm

from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from trtspec.ops.norm import rms_norm_inline

# In fp32: sums of up to 300 squares, a root and three products. fp16 may round to the neighbour, twice.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3}


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 5, 64, 300]),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([1e-6, 0.5]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_it_is_the_reference(
    size: int, rows: list[int], dtype: torch.dtype, eps: float, slices: bool, seed: int
) -> None:
    """The result is the reference's for rows that lie next to each other, or are slices of longer ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, size + 3 * slices, generator=g).mul(3).to(dtype)[..., :size]
    weight = torch.randn(size, generator=g).to(dtype)
    tolerance = TOLERANCE[dtype]
    wanted = rms_norm_inline(x, weight, eps)
    torch.testing.assert_close(rms_norm(x, weight, eps), wanted, rtol=tolerance, atol=tolerance)
    for place in range(rows[0]):
        assert torch.equal(rms_norm(x[place : place + 1], weight, eps), rms_norm(x, weight, eps)[place : place + 1])


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
