"""Packed layouts in pure torch: unpacking returns what was packed, and whole models compute the same from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trtspec.models.layers import Linear, PackedEmbedding, weight_bytes
from trtspec.models.pack_weights import pack_decoder
from trtspec.ops import packed_linear
from trtspec.ops.linear import _reference
from trtspec.ops.packing import (
    pack_fp8,
    pack_int4,
    pack_int8,
    pack_panels,
    packed_rows,
    quantize_int4,
    quantize_int8,
    unpack,
)

NONE = torch.empty(0)
floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
widths, depths, group_sizes = st.integers(1, 100), st.integers(1, 300), st.sampled_from([32, 64, 128])


def random_weight(width: int, depth: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(width, depth, generator=torch.Generator().manual_seed(width * depth)).to(dtype)


def check_rows(weight: Tensor, scales: Tensor, zeros: Tensor, matrix: Tensor) -> None:
    ids = torch.randint(matrix.shape[0], (7,))
    assert torch.equal(packed_rows(ids, weight, scales, zeros, matrix.shape[1]).float(), matrix[ids])


@given(dtype=floats, width=widths, depth=depths)
def test_panels_hold_the_matrix(dtype: torch.dtype, width: int, depth: int) -> None:
    weight = random_weight(width, depth, dtype)
    panels = pack_panels(weight)
    count = -(-width // 32)
    assert panels.dtype == dtype
    assert panels.shape == ((count, depth, 32) if dtype == torch.float32 else (count, -(-depth // 2), 32, 2))
    matrix = unpack(panels, NONE, NONE, width, depth)
    assert torch.equal(matrix, weight.float())
    assert packed_rows(torch.tensor([0]), panels, NONE, NONE, depth).dtype == dtype
    check_rows(panels, NONE, NONE, matrix)


@given(width=widths, depth=depths)
def test_int8_is_off_by_half_a_step(width: int, depth: int) -> None:
    weight = random_weight(width, depth)
    weight[width // 2] = 0
    panels, scales = quantize_int8(weight)
    assert panels.shape == (-(-width // 32), -(-depth // 4), 32, 4)
    assert scales.shape == (-(-width // 32), 32)
    matrix = unpack(panels, scales, NONE, width, depth)
    assert ((matrix - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.50001).all()
    check_rows(panels, scales, NONE, matrix)


@given(width=widths, groups=st.integers(1, 4), group_size=group_sizes, offset=st.sampled_from([-5.0, 0.0, 5.0]))
def test_int4_is_off_by_half_a_step(width: int, groups: int, group_size: int, offset: float) -> None:
    """The error includes that of rounding the zero and the scale: another half step, and 2^-11 of 15 steps."""
    weight = random_weight(width, groups * group_size) + offset
    packed = quantize_int4(weight, group_size)
    assert packed[0].shape == (-(-width // 32), groups * group_size // 8, 32, 4)
    assert packed[1].shape == packed[2].shape == (-(-width // 32), groups, 32)
    matrix = unpack(*packed, width, groups * group_size)
    by_group = weight.unflatten(1, (groups, -1))
    step = (by_group.amax(2).clamp(min=0) - by_group.amin(2).clamp(max=0)) / 15
    assert ((matrix - weight).abs().unflatten(1, (groups, -1)) <= 1.02 * step[:, :, None]).all()
    check_rows(*packed, matrix)


@given(width=widths, groups=st.integers(1, 4), group_size=group_sizes)
def test_symmetric_int4_is_off_by_half_a_step(width: int, groups: int, group_size: int) -> None:
    """A step is a seventh of the largest of a group. Rounding the scale adds an error of 2^-11 of 7 steps."""
    weight = random_weight(width, groups * group_size)
    packed = quantize_int4(weight, group_size, symmetric=True)
    assert packed[2].numel() == 0
    matrix = unpack(*packed, width, groups * group_size)
    step = weight.unflatten(1, (groups, -1)).abs().amax(2) / 7
    assert ((matrix - weight).abs().unflatten(1, (groups, -1)) <= 0.505 * step[:, :, None]).all()
    check_rows(*packed, matrix)


@given(width=widths, groups=st.integers(1, 4), group_size=group_sizes, with_zeros=st.booleans())
def test_int4_keeps_values_that_are_four_bits_already(
    width: int, groups: int, group_size: int, with_zeros: bool
) -> None:
    values = torch.randint(16, (width, groups * group_size), dtype=torch.uint8)
    scales = torch.rand(width, groups).half()
    zeros = torch.randint(16, (width, groups), dtype=torch.uint8) if with_zeros else None
    packed = pack_int4(values, scales, zeros)
    assert packed[2].numel() == (packed[1].numel() if with_zeros else 0)
    zero = torch.full((width, groups), 8.0) if zeros is None else zeros.float()
    expected = (values.unflatten(1, (groups, -1)).float() - zero[:, :, None]) * scales.float()[:, :, None]
    matrix = unpack(*packed, width, groups * group_size)
    assert torch.equal(matrix, expected.flatten(1))
    check_rows(*packed, matrix)


@given(width=widths, groups=st.integers(1, 4), group_size=group_sizes)
def test_int8_keeps_values_that_are_eight_bits_already(width: int, groups: int, group_size: int) -> None:
    values = torch.randint(-128, 128, (width, groups * group_size), dtype=torch.int8)
    scales = torch.randn(width, groups).half()
    packed = (*pack_int8(values, scales), NONE)
    assert packed[0].shape == (-(-width // 32), groups * group_size // 4, 32, 4)
    assert packed[1].shape == (-(-width // 32), groups, 32)
    assert packed[1].dtype == torch.float16
    matrix = unpack(*packed, width, groups * group_size)
    expected = values.unflatten(1, (groups, -1)).float() * scales.float()[:, :, None]
    assert torch.equal(matrix, expected.flatten(1))
    check_rows(*packed, matrix)


@given(width=widths, depth=depths)
def test_fp8_keeps_values_and_scales(width: int, depth: int) -> None:
    values, scales = random_weight(width, depth).to(torch.float8_e4m3fn), torch.rand(width)
    packed = (*pack_fp8(values, scales), NONE)
    assert packed[0].shape == (-(-width // 32), -(-depth // 4), 32, 4)
    matrix = unpack(*packed, width, depth)
    assert torch.equal(matrix, values.float() * scales[:, None])
    check_rows(*packed, matrix)


def test_where_an_input_lies() -> None:
    """One element of each layout is where the contract places it."""
    weight = random_weight(70, 64)
    column, k = 45, 27
    assert pack_panels(weight)[1, k, 13] == weight[column, k]
    assert pack_panels(weight.bfloat16())[1, k // 2, 13, k % 2] == weight.bfloat16()[column, k]
    panels, scales = quantize_int8(weight)
    assert panels[1, k // 4, 13, k % 4] == (weight[column, k] / scales[1, 13]).round()
    values = torch.randint(16, (70, 64), dtype=torch.uint8)
    panels = pack_int4(values, torch.ones(70, 2), None)[0]
    eighth = weight.to(torch.float8_e4m3fn)
    assert pack_fp8(eighth, torch.ones(70))[0][1, k // 4, 13, k % 4] == eighth[column, k]
    assert panels[1, 3, 13, 2] == values[column, 24 + 2] | values[column, 24 + 4 + 2] << 4


@pytest.mark.parametrize(("depth", "group_size"), [(64, 16), (65, 32), (96, 64)])
def test_int4_wants_whole_groups(depth: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="use int8"):
        quantize_int4(torch.randn(8, depth), group_size)


def test_int8_in_groups_wants_whole_ones() -> None:
    for groups in (1, 4, 0):  # of 256, of 64 and a half, and none
        with pytest.raises(ValueError, match=r"int8 with 25[68] inputs in groups of"):
            pack_int8(torch.zeros(8, 258 if groups == 4 else 256, dtype=torch.int8), torch.ones(8, groups))


def test_panels_want_a_floating_point_weight() -> None:
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        pack_panels(torch.zeros(4, 4, dtype=torch.int32))


@settings(deadline=None)
@given(dtype=floats, rows=st.integers(0, 20), width=widths, depth=depths, float_out=st.booleans())
def test_the_reference_computes_panels_as_a_plain_weight(
    dtype: torch.dtype, rows: int, width: int, depth: int, float_out: bool
) -> None:
    weight, x, bias = random_weight(width, depth, dtype), torch.randn(rows, depth).to(dtype), torch.randn(width)
    plain = _reference(x, weight, NONE, NONE, bias.to(dtype), None, width, float_out)
    packed = _reference(x, pack_panels(weight), NONE, NONE, bias.to(dtype), None, width, float_out)
    assert plain.dtype == (torch.float32 if float_out else dtype)
    assert torch.equal(packed, plain)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["int4", "int8", "int8 in groups"]),
    rows=st.integers(1, 30),
    width=widths,
    groups=st.integers(1, 4),
)
def test_reference_rows_of_integer_weights_do_not_know_of_each_other(
    kind: str, rows: int, width: int, groups: int
) -> None:
    weight, x = random_weight(width, 32 * groups), torch.randn(rows, 32 * groups)
    packed = quantize_int4(weight, 32) if kind == "int4" else (*quantize_int8(weight), NONE)
    if kind == "int8 in groups":
        scales = weight.unflatten(1, (groups, 32)).abs().amax(2).half() / 126
        values = (weight / scales.float().repeat_interleave(32, 1)).round().to(torch.int8)
        packed = (*pack_int8(values, scales), NONE)
    together = _reference(x, *packed, None, None, width, True)
    assert torch.equal(torch.cat([_reference(row, *packed, None, None, width, True) for row in x.split(1)]), together)
    error = together.double() - x.double() @ unpack(*packed, width, 32 * groups).double().T
    assert (error.abs() <= 0.02 * (x.norm(dim=1)[:, None] * weight.norm(dim=1)) + 1e-6).all()


@settings(deadline=None)
@given(rows=st.integers(1, 30), width=widths, depth=depths, static=st.booleans())
def test_reference_rows_of_fp8_weights_do_not_know_of_each_other(
    rows: int, width: int, depth: int, static: bool
) -> None:
    weight, x = random_weight(width, depth).to(torch.float8_e4m3fn), torch.randn(rows, depth)
    packed, x_scale = (*pack_fp8(weight, torch.rand(width)), NONE), torch.tensor([0.01]) if static else None
    together = _reference(x, *packed, None, x_scale, width, True)
    alone = [_reference(row, *packed, None, x_scale, width, True) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), together)


def test_a_packed_weight_needs_its_width() -> None:
    with pytest.raises(ValueError, match="out_features"):
        packed_linear(torch.randn(2, 8), pack_panels(torch.randn(32, 8)))


class Tied(nn.Module):
    """The smallest model with all kinds of linears: embedding -> linear -> head."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding(50, 64)
        self.inner = Linear(64, 64, bias=True)
        self.head = Linear(64, 50, bias=False, float_out=True)
        if tied:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.to(dtype).eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(ids)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_packed_model_computes_the_same(tied: bool, dtype: torch.dtype) -> None:
    model, ids = Tied(tied, dtype), torch.tensor([3, 49, 3])
    before, rows = model(ids), model.embedding(ids)
    pack_decoder(model)
    torch.testing.assert_close(model(ids), before, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    assert before.dtype == torch.float32
    assert torch.equal(model.embedding(ids), rows)
    assert isinstance(model.embedding, PackedEmbedding) == tied
    if tied:
        assert model.embedding.weight is model.head.weight
    pack_decoder(model)  # packed linears are left alone


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4), ("int4_g64", 4)])
@torch.no_grad()
def test_a_quantised_model_keeps_its_head(quantization: str, bits: int) -> None:
    model, ids = Tied(True, torch.bfloat16), torch.arange(50)
    before = model(ids)
    pack_decoder(model, quantization)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.inner.weight.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert (model(ids) - before).norm() < (0.03 if bits == 8 else 0.2) * before.norm()
    group_bytes = {"int8": 4 * 64, "int4": 3 * 2 * 64, "int4_g64": 3 * 64}[quantization]
    inner = 64 * 64 * bits // 8 + group_bytes + 2 * 64  # values, scales and zeros, bias
    assert weight_bytes(model) == inner + 64 * 64 * 2  # 50 columns fill two panels


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "int4"])
@torch.no_grad()
def test_a_head_is_quantised_where_that_is_asked(tied: bool, quantization: str | None) -> None:
    """A head is quantised if that is asked, and an embedding of the same matrix with it.

    The embedding's rows are then the values that the int8 numbers stand for.
    """
    model, ids = Tied(tied, torch.bfloat16), torch.arange(50)
    before, rows, weight = model(ids), model.embedding(ids), model.head.weight.detach().clone()
    pack_decoder(model, quantization, lm_head="int8")
    assert model.head.weight.dtype == torch.int8
    assert model.inner.weight.dtype == (torch.bfloat16 if quantization is None else torch.uint8)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127  # of each row's numbers
    now = model.embedding(ids)
    assert now.dtype == torch.bfloat16
    assert torch.equal(now, ((weight / step).round() * step).bfloat16() if tied else rows)
    assert (model(ids) - before).norm() < (0.03 if quantization is None else 0.2) * before.norm()


def test_a_drafts_tied_head_stays_where_the_targets_is_quantised() -> None:
    target, draft = Tied(False, torch.bfloat16), Tied(True, torch.bfloat16)
    pack_decoder(Pair(target, draft), None, draft, "int8", lm_head="int8")
    assert target.head.weight.dtype == torch.int8
    assert draft.head.weight.dtype == torch.bfloat16


class Pair(nn.Module):
    """A target and a draft next to it."""

    def __init__(self, target: Tied, draft: nn.Module) -> None:
        super().__init__()
        self.draft, self.target = draft, target


@pytest.mark.parametrize("draft_kind", ["int8", None])
def test_a_draft_has_a_quantization_of_its_own(draft_kind: str | None) -> None:
    """A draft's own head is quantised, too. A head that it shares with the target or with an embedding is not."""
    kind = torch.int8 if draft_kind else torch.bfloat16
    own, sharing, tied = Tied(False, torch.bfloat16), Tied(False, torch.bfloat16), Tied(True, torch.bfloat16)
    for draft in (own, sharing, tied):
        target = Tied(False, torch.bfloat16)
        if draft is sharing:
            draft.head = target.head
        pack_decoder(Pair(target, draft), "int4", draft, draft_kind)
        assert target.inner.weight.dtype == torch.uint8
        assert target.head.weight.dtype == torch.bfloat16
        assert draft.inner.weight.dtype == kind
        assert draft.head.weight.dtype == (kind if draft is own else torch.bfloat16)


def test_a_draft_alone_is_quantised_with_its_head() -> None:
    draft = Tied(False, torch.bfloat16)
    pack_decoder(draft, "int4", draft, "int8")
    assert draft.inner.weight.dtype == draft.head.weight.dtype == torch.int8


def test_what_pack_refuses() -> None:
    linear = Linear(64, 8, bias=False)
    with pytest.raises(ValueError, match="int4_g128"):
        linear.pack("int3")
    nn.init.normal_(linear.weight)
    linear.pack("int8")
    with pytest.raises(ValueError, match="packed already"):
        linear.pack()
