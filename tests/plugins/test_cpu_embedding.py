"""packed_embedding in C++ returns the reference's bits for every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.plugins.packed_layers import GROUPS, NONE, random_int8_groups
from trtspec.ops import load_plugins, packed_embedding
from trtspec.ops.packing import pack_int4, pack_panels, packed_rows, quantize_int4, quantize_int8

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def packed(layout: str | torch.dtype, width: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * width + depth)
    weight = torch.randn(width, depth, generator=generator)
    if isinstance(layout, torch.dtype):
        return pack_panels(weight.to(layout)), NONE, NONE
    if layout == "int8":
        return *quantize_int8(weight), NONE
    if layout.startswith("int8-"):
        return random_int8_groups(width, depth, GROUPS[layout])
    if width % 2:  # half of the matrices have no zeros
        return quantize_int4(weight, GROUPS[layout])
    values = torch.randint(16, (width, depth), generator=generator, dtype=torch.uint8)
    return pack_int4(values, torch.rand(width, depth // GROUPS[layout], generator=generator), None)


@settings(deadline=None)
@given(st.sampled_from([*FLOATS, "int8", *GROUPS]), st.integers(1, 100), st.integers(1, 300), st.integers(0, 9))
def test_rows_are_the_references(layout: str | torch.dtype, width: int, depth: int, count: int) -> None:
    depth += -depth % GROUPS.get(str(layout), 1)
    matrix = packed(layout, width, depth)
    ids = torch.randint(width, (count,))
    expected = packed_rows(ids, *matrix, depth)
    rows = packed_embedding(ids, *matrix, depth)
    assert rows.dtype == expected.dtype
    assert torch.equal(rows, expected)


def test_a_plain_matrix_is_looked_up_too() -> None:
    weight = torch.randn(10, 6)
    assert torch.equal(packed_embedding(torch.tensor([3, 0]), weight, NONE, NONE, 6), weight[[3, 0]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([64]), "id 64 of 64 rows"),
        (torch.tensor([0, -1]), "id -1"),
        (torch.tensor([[0]]), r"want \[n\] int64"),
        (torch.tensor([0], dtype=torch.int32), r"want \[n\] int64"),
    ],
)
def test_bad_ids(ids: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        packed_embedding(ids, *packed(torch.float32, 40, 8), 8)


def test_bad_matrices() -> None:
    ids = torch.tensor([0])
    panels, scales, none = packed("int8", 40, 8)
    cases: list[tuple[tuple[Tensor, Tensor, Tensor, int], str]] = [
        ((panels, scales, none, 9), "9 inputs"),
        ((panels, scales, none, 4), "4 inputs"),
        ((panels[:, :, :16], scales, none, 8), "want panels"),
        ((panels, scales[:1], none, 8), "scales is"),
        ((panels, scales.half(), none, 8), "scales is"),
        ((panels, scales, scales.to(torch.uint8), 8), "zeros is"),
    ]
    nibbles, halves, _ = packed("int4-32", 40, 64)
    cases.append(((nibbles, halves.flatten(1), none, 64), "scales is"))
    octets, halves, _ = packed("int8-32", 40, 64)
    cases.append(((octets, halves.float(), none, 64), "scales is"))
    cases.append(((octets, halves, halves.to(torch.uint8), 64), "zeros is"))
    for arguments, message in cases:
        with pytest.raises(RuntimeError, match=message):
            packed_embedding(ids, *arguments)
