"""The packed layouts of `packed_linear`: matrices [N, K] rearranged so that few rows of x cost one pass over them.

Every layout but plain is made of 32-bit words. A word holds the next few inputs of one output column: one fp32, two
bf16 or fp16, four int8 or fp8, or eight 4-bit values. Words of 32 neighbouring columns lie next to each other (128
bytes, a *step*). All steps of these 32 columns follow each other (a *panel*). So a kernel reads memory in ascending
order, broadcasts a word of x and multiplies it with a vector of columns. P = ceil(N / 32) is the number of panels.
Columns and inputs that do not exist are zeros.

    layout    weight                              scales                zeros
    plain     [N, K] of x's dtype                 none                  none
    fp32      [P, K, 32]                          none                  none
    bf16/fp16 [P, ceil(K/2), 32, 2]               none                  none
    int8      [P, ceil(K/4), 32, 4] int8          [P, 32] fp32          none
    int8      [P, K/4, 32, 4] int8                [P, K/g, 32] fp16     none
    int4      [P, K/8, 32, 4] uint8               [P, K/g, 32] fp16     [P, K/g, 32] uint8, or none: 8 everywhere
    fp8       [P, ceil(K/4), 32, 4] float8_e4m3fn [P, 32] fp32          none

"none" is a tensor of no elements. Byte j of an int4 word s holds input 8s + j in its low four bits and input 8s + 4 + j
in its high four bits. A value q stands for scale * (q - zero), with a scale and a zero for every g inputs of a column.
int8 has a scale for each column, or for every g inputs of a column: the shape of its scales tells.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUT = 1
"""Version of all these layouts. It changes when packed weights can no longer be read."""

PANEL = 32
"""Number of output columns of a panel."""

GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale in int4, and in int8 in groups."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantised."""

_SMALLEST_HALF = 2.0**-14  # the smallest normal fp16: smaller scales would lose bits
_BYTES_PER_WORD = 4


def pack_panels(weight: Tensor) -> Tensor:
    """weight [N, K] fp32, bf16 or fp16 -> panels [P, K, 32] fp32 or [P, ceil(K/2), 32, 2]."""
    if weight.dtype not in FLOATS:
        raise TypeError(f"pack_panels: weight is {weight.dtype}; want float32, bfloat16 or float16")
    panels = _to_panels(weight)
    return panels.squeeze(-1) if weight.dtype == torch.float32 else panels


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (panels [P, ceil(K/4), 32, 4] int8, scales [P, 32] fp32), symmetric for each output column."""
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1) / 127
    values = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return pack_int8(values, scales)


def pack_int8(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Pack weights that are 8-bit already: values [N, K] int8, scales [N], or [N, K/g] in groups.

    Returns (panels [P, ceil(K/4), 32, 4] int8, scales [P, 32] fp32 or, in groups, [P, K/g, 32] fp16).
    """
    if scales.ndim == 1:
        return _to_panels(values), _columns_to_panels(scales.float())
    _check_group_size(values.shape[1], values.shape[1] // max(scales.shape[1], 1), "int8")
    return _to_panels(values), _groups_to_panels(scales.to(torch.float16))


def pack_fp8(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Pack fp8 weights: values [N, K] float8_e4m3fn, scales [N].

    Returns (panels [P, ceil(K/4), 32, 4] float8_e4m3fn, scales [P, 32] fp32).
    """
    # as bytes, since torch pads and copies few 8-bit dtypes
    return _to_panels(values.view(torch.uint8)).view(values.dtype), _columns_to_panels(scales.float())


def quantize_int4(weight: Tensor, group_size: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> (panels uint8, scales fp16, zeros uint8); each group spans its minimum, its maximum and 0.

    symmetric: a group spreads equally far on both sides of 0, without zero points. zeros then has no elements, as in
    `pack_int4`.
    """
    _check_group_size(weight.shape[1], group_size)
    groups = weight.detach().float().reshape(weight.shape[0], -1, group_size)  # [N, K/g, g]
    if symmetric:
        scales = (groups.abs().amax(dim=2) / 7).clamp(min=_SMALLEST_HALF).to(torch.float16)
        values = (groups / scales.float()[:, :, None]).round_().add_(8).clamp_(0, 15)
        return pack_int4(values.to(torch.uint8).flatten(1), scales, None)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)  # 0 is always representable
    scales = ((high - low) / 15).clamp(min=_SMALLEST_HALF).to(torch.float16)
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    values = (groups / scales.float()[:, :, None]).round_().add_(zeros[:, :, None]).clamp_(0, 15)
    return pack_int4(values.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8))


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pack weights that are 4-bit already.

    values [N, K] uint8 0..15, scales [N, K/g], zeros [N, K/g] 0..15 or None (8).
    Returns (panels [P, K/8, 32, 4] uint8, scales [P, K/g, 32] fp16, zeros [P, K/g, 32] uint8 or of no elements).
    """
    _check_group_size(values.shape[1], values.shape[1] // max(scales.shape[1], 1))
    low, high = values.reshape(values.shape[0], -1, 2, _BYTES_PER_WORD).unbind(2)  # [N, K/8, 4]
    panels = _to_panels((low | high << 4).flatten(1))
    packed_scales = _groups_to_panels(scales.to(torch.float16))
    if zeros is None:
        return panels, packed_scales, values.new_empty(0)
    return panels, packed_scales, _groups_to_panels(zeros.to(torch.uint8))


def unpack(weight: Tensor, scales: Tensor, zeros: Tensor, out_features: int, in_features: int) -> Tensor:
    """Matrix [N, K] fp32 that a weight in any layout stands for."""
    if weight.ndim == 2:
        return weight.float()
    values = unpack_values(weight)[:out_features, :in_features].float()
    if weight.dtype in FLOATS:
        return values
    if scales.ndim == 2:
        return values * scales.flatten()[:out_features, None]
    scale, zero = (t[:out_features] for t in unpack_groups(weight, scales, zeros))
    return _dequantize(values, scale, zero)


def packed_rows(ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, in_features: int) -> Tensor:
    """Rows `ids` [n] of the matrix [N, K] in any layout, [n, K]. This is the reference of `packed_embedding`."""
    if weight.ndim == 2:
        return weight[ids]
    panel, column = ids // PANEL, ids % PANEL
    rows = weight[panel, :, column]  # [n, steps] or [n, steps, values of a word]
    if weight.dtype in FLOATS:
        return rows.flatten(1)[:, :in_features]
    if scales.ndim == 2:
        return rows.flatten(1)[:, :in_features].float() * scales[panel, column][:, None]
    scale = scales[panel, :, column].float()  # [n, K/g]
    if weight.dtype == torch.int8:
        return _dequantize(rows.flatten(1).float(), scale, torch.zeros_like(scale))
    zero = zeros[panel, :, column].float() if zeros.numel() else torch.full_like(scale, 8.0)
    return _dequantize(_nibbles(rows).float(), scale, zero)


def unpack_values(weight: Tensor) -> Tensor:
    """Numbers stored in panels, [32 P, K rounded up to whole words], in the weight's dtype (int4: 0..15)."""
    columns = weight.transpose(1, 2).flatten(0, 1)  # [32 P, steps] or [32 P, steps, values of a word]
    return _nibbles(columns) if weight.dtype == torch.uint8 else columns.flatten(1)


def unpack_groups(weight: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros of int4, or of int8 in groups, each [32 P, K/g] fp32."""
    scale = scales.transpose(1, 2).flatten(0, 1).float()
    if zeros.numel():
        return scale, zeros.transpose(1, 2).flatten(0, 1).float()
    return scale, torch.full_like(scale, 0.0 if weight.dtype == torch.int8 else 8.0)


def _to_panels(rows: Tensor) -> Tensor:
    """rows [N, K] of 1, 2 or 4 bytes an element -> [P, steps, 32, elements of a word], padded with zeros."""
    per_word = _BYTES_PER_WORD // rows.element_size()
    missing_columns, missing_inputs = -rows.shape[0] % PANEL, -rows.shape[1] % per_word
    if missing_columns or missing_inputs:
        rows = F.pad(rows, (0, missing_inputs, 0, missing_columns))
    words = rows.detach().contiguous().view(torch.int32)  # moving whole words is several times faster
    panels = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()  # [P, steps, 32]
    return panels.unsqueeze(-1).view(rows.dtype)


def _columns_to_panels(per_column: Tensor) -> Tensor:
    """[N, ...] -> [P, 32, ...], padded with zeros."""
    padding = (0, 0) * (per_column.ndim - 1) + (0, -per_column.shape[0] % PANEL)
    return F.pad(per_column, padding).reshape(-1, PANEL, *per_column.shape[1:])


def _groups_to_panels(per_group: Tensor) -> Tensor:
    """[N, K/g] -> [P, K/g, 32], padded with zeros."""
    return _columns_to_panels(per_group).transpose(1, 2).contiguous()


def _dequantize(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """values [n, K], scale, zero [n, K/g] -> [n, K] fp32."""
    groups = values.reshape(*scale.shape, values.shape[1] // scale.shape[1])
    return ((groups - zero[:, :, None]) * scale[:, :, None]).flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """[n, steps, 4] uint8 -> [n, 8 * steps] uint8; the low halves of a word come before its high halves."""
    return torch.stack((words & 15, words >> 4), dim=2).flatten(1)


def _check_group_size(in_features: int, group_size: int, kind: str = "int4") -> None:
    if group_size not in GROUP_SIZES or in_features % group_size:
        raise ValueError(
            f"{kind} with {in_features} inputs in groups of {group_size}: the group size must be one of {GROUP_SIZES} "
            "and divide the inputs; use int8 with a scale per output channel for this layer"
        )
