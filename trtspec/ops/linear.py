"""packed_linear: a linear layer for few rows in which the result of a row does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.ops.dispatch import define
from trtspec.ops.elementwise import silu_mul
from trtspec.ops.packing import PANEL, unpack_groups, unpack_values
from trtspec.ops.products import product

TINY = 1e-30
"""Limit for rows (or groups) of x: one whose largest magnitude is below it counts as zero when x is quantised."""

E4M3_LARGEST = 448.0
"""The largest number of torch.float8_e4m3fn."""

_EXACT_DEPTH = 1024
"""Number of products of two int8 whose sum is below 2^24, so that fp32 holds it exactly in any order."""


def _reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    float_out: bool,
) -> Tensor:
    if weight.dtype in _QUANTISED:
        out = _QUANTISED[weight.dtype](x, weight, scales, zeros, x_scale)[:, :out_features]
        if bias is not None:
            out = out + bias.float()
        return out if float_out else out.to(x.dtype)
    if weight.ndim > 2:
        weight = unpack_values(weight)[:out_features, : x.shape[1]].contiguous()
    if x.device.type != "cpu" and not float_out:
        return F.linear(x, weight, bias)
    out = product(x.float(), weight.float())
    if bias is not None:
        out = out + bias.float()
    return out if float_out else out.to(x.dtype)


def _int8(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, x_scale: Tensor | None) -> Tensor:
    """Product with int8 weights, [T, 32 P] fp32. Only the last line rounds, as integer sums are exact."""
    if scales.ndim == 3:
        return _groups(x, weight, scales, zeros, x_scale)
    values = unpack_values(weight)
    x_values, x_scales = _quantize(F.pad(x, (0, values.shape[1] - x.shape[1]))[:, None])
    dot = torch.zeros(x.shape[0], values.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, values.shape[1], _EXACT_DEPTH):
        part = slice(start, start + _EXACT_DEPTH)
        dot += (x_values[:, 0, part] @ values[:, part].float().T).to(torch.int32)
    return dot.float() * (x_scales * scales.flatten())


def _groups(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, x_scale: Tensor | None) -> Tensor:
    """Product with weights in groups, [T, 32 P] fp32. It adds groups one after the other, as the kernels do."""
    scale, zero = unpack_groups(weight, scales, zeros)  # [32 P, K/g]
    groups = scale.shape[1]
    values = unpack_values(weight).float().reshape(*scale.shape, -1)
    x_values, x_scales = _quantize(x.reshape(x.shape[0], groups, -1))
    out = torch.zeros(x.shape[0], scale.shape[0], device=x.device)
    for i in range(groups):
        x_group = x_values[:, i]
        dot = x_group @ values[:, i].T - x_group.sum(1, keepdim=True) * zero[:, i]  # exact: below 2^24
        out = out + dot * (x_scales[:, i, None] * scale[:, i])
    return out


def _fp8(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, x_scale: Tensor | None) -> Tensor:
    """Product with fp8 weights, [T, 32 P] fp32: an fp32 product of the stored values, scaled by both scales at once."""
    values = unpack_values(weight).float()
    x, scale = x.float(), scales.flatten()
    if x_scale is not None and x_scale.numel():
        x, scale = round_e4m3(x, x_scale), scale * x_scale
    return product(F.pad(x, (0, values.shape[1] - x.shape[1])), values) * scale


def round_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale [1] in fp32, clamped to +-448 and rounded to the nearest e4m3, ties to even: a multiple of the scale.

    Infinities are clamped too; NaN stays.
    """
    return (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


_QUANTISED: dict[torch.dtype, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {
    torch.int8: _int8,
    torch.uint8: _groups,
    torch.float8_e4m3fn: _fp8,
}
"""Product for each dtype of a quantised weight: (x, weight, scales, zeros, x_scale) -> [T, 32 P] fp32."""


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, groups, g] -> (integers -127..127 as fp32, scales [T, groups]), symmetric in each group, ties to even.

    A group with an infinity or a NaN gets integers 0 and a scale that is not finite, so that its results are NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=2, keepdim=True)
    # Tensors only: on some devices, a division by a Python number rounds twice.
    limit = torch.full_like(largest, 127.0)
    fits = (largest >= TINY) & largest.isfinite()
    integers = torch.where(fits, (x * (limit / largest)).round(), 0.0)
    return integers, (largest / limit)[:, :, 0]


def _fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    float_out: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=torch.float32 if float_out else x.dtype)


_op = define(
    "packed_linear(Tensor x, Tensor weight, Tensor scales, Tensor zeros, Tensor? bias, Tensor? x_scale, "
    "int out_features, bool float_out) -> Tensor",
    _reference,
    _fake,
)


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_features: int | None = None,
    float_out: bool = False,
) -> Tensor:
    """x [T, K] @ weight^T + bias [N] -> [T, N] in x's dtype, or fp32. Row t depends on x[t] alone, bit for bit.

    weight, scales, zeros: one of the layouts of `trtspec.ops.packing`; the weight's shape and dtype say which. Scales
    and zeros that a layout does not have are None or have no elements. A weight that is not quantised has x's dtype.
    bias: has x's dtype.
    x_scale: [1] fp32 for fp8 weights whose x is rounded too; None or no elements = x as it is.
    out_features: N. It is needed for a packed weight, whose panels are padded.
    float_out: results are fp32 as accumulated, not rounded to x's dtype.

    int8 and int4 weights multiply rows of x that are rounded to int8. x then has one scale for each row or, if weights
    are in groups, for each row and group. Sums within a group are exact integers. Groups are scaled in fp32 and added
    in order.
    fp8 weights multiply x in fp32, or `round_e4m3(x, x_scale)`. The fp32 sum is scaled by scales and x_scale.
    """
    if out_features is None:
        if weight.ndim != 2:
            raise ValueError(f"packed_linear: give out_features for a packed weight (of shape {tuple(weight.shape)})")
        out_features = weight.shape[0]
    scales = x.new_empty(0) if scales is None else scales
    zeros = x.new_empty(0) if zeros is None else zeros
    return cast(Tensor, _op(x, weight, scales, zeros, bias, x_scale, out_features, float_out))


def _swiglu(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
) -> Tensor:
    return silu_mul(cast(Tensor, _op(x, weight, scales, zeros, bias, x_scale, out_features, False)))


_swiglu_op = define(
    "packed_swiglu(Tensor x, Tensor weight, Tensor scales, Tensor zeros, Tensor? bias, Tensor? x_scale, "
    "int out_features) -> Tensor",
    _swiglu,
    lambda x, weight, scales, zeros, bias, x_scale, out_features: x.new_empty(x.shape[0], out_features // 2),
)


def packed_swiglu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    zeros: Tensor,
    x_scale: Tensor | None,
    out_features: int,
) -> Tensor:
    """`silu_mul` of `packed_linear`, with the same bits: x [T, K] -> [T, out_features / 2] in x's dtype.

    The arguments and errors are those of packed_linear. out_features: an even number. The first half of the columns are
    gates, the others ups. Kernels need not store them.
    """
    return cast(Tensor, _swiglu_op(x, weight, scales, zeros, bias, x_scale, out_features))


def _quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = _quantize(x.reshape(x.shape[0], -1, group))
    octets = values.to(torch.int8).flatten(1)
    return octets.view(torch.int32), scales, values.sum(2).to(torch.int32)


def _quantize_groups_fake(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    (T, K), integers = x.shape, torch.int32
    groups = K // group
    scales = x.new_empty(T, groups, dtype=torch.float32)
    return x.new_empty(T, K // 4, dtype=integers), scales, x.new_empty(T, groups, dtype=integers)


_quantize_groups_op = define(
    "quantize_groups(Tensor x, int group) -> (Tensor, Tensor, Tensor)", _quantize_groups, _quantize_groups_fake
)


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round x [T, K] to int8 in groups, as packed_linear does for weights in groups of `group` inputs.

    Returns the integers [T, K/4] int32, four to a number, the scales [T, K/group] fp32, and the sums of the integers of
    each group [T, K/group] int32. It is the first half of packed_linear; TensorRT has a plugin for each half.
    """
    return cast("tuple[Tensor, Tensor, Tensor]", _quantize_groups_op(x, group))


def _groups_linear(
    x: Tensor,
    values: Tensor,
    x_scales: Tensor,
    x_sums: Tensor,
    panels: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor,
    bits: int,
) -> Tensor:
    octets = panels.view(torch.int8 if bits == 8 else torch.uint8).view(*panels.shape[:2], PANEL, 4)
    points = zeros.view(torch.uint8) if bits == 4 else x.new_empty(0, dtype=torch.uint8)
    return _reference(x, octets, scales, points, bias, None, bias.shape[0], False)


_groups_linear_op = define(
    "groups_linear(Tensor x, Tensor values, Tensor x_scales, Tensor x_sums, Tensor panels, Tensor scales, "
    "Tensor zeros, Tensor bias, int bits) -> Tensor",
    _groups_linear,
    lambda x, values, x_scales, x_sums, panels, scales, zeros, bias, bits: x.new_empty(x.shape[0], bias.shape[0]),
)


def groups_linear(
    x: Tensor,
    values: Tensor,
    x_scales: Tensor,
    x_sums: Tensor,
    panels: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor,
    bits: int,
) -> Tensor:
    """The second half of packed_linear with weights in groups: [T, N] in x's dtype.

    x [T, K]; values, x_scales, x_sums: what quantize_groups makes of it. panels [P, K * bits / 32, 32] int32, scales
    [P, K/g, 32] fp16, zeros [P, K/g, 8] int32 (8 bits: anything): the layouts of ops.packing, four bytes to a number.
    bias [N] in x's dtype. bits: 4 or 8, of a weight.
    """
    return cast(Tensor, _groups_linear_op(x, values, x_scales, x_sums, panels, scales, zeros, bias, bits))
