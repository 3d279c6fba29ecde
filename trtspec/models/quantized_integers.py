"""Weights that are integers already in the checkpoint: public layouts become ours, value by value, not rounded anew.

Tensors of a linear [N, K] with a scale for every g of its K inputs (G = K / g; 1 for a scale per output channel). An
int32 word holds w values, the first in the lowest bits:

    pack-quantized   weight_packed [N, ceil(K/w)], weight_scale [N, G], weight_shape [2] = (N, K), and without symmetry
                     weight_zero_point [ceil(N/w), G]; values and zero points are offset by half the range
    int-quantized    weight [N, K] int8, weight_scale [N, G], and without symmetry weight_zero_point [N, G] int8
    gptq             qweight [K/w, N], qzeros [G, N/w] (stored minus one in format "gptq"), scales [G, N],
                     g_idx [K] (the group of each input; if they are not in order, the linear sorts its inputs)
    awq              qweight [K, N/8], qzeros [G, N/8], scales [G, N]; a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7

Sources: `pack_to_int32` of vllm-project/compressed-tensors, AutoGPTQ's QuantLinear.pack, AutoAWQ's WQLinear_GEMM.

Scales become fp16 for 4-bit weights, and for 8-bit weights in groups. The conversion is exact for fp16 scales, and for
bf16 scales from 2^-17 (7.6e-6) to 65504. Others are rounded, by at most 2^-11 of their value or, below 2^-14, by at
most 2^-25. A warning then says how far weights moved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from trtspec.config.checkpoint.weight_schemes import IntegerScheme
from trtspec.models.layers import Linear
from trtspec.models.quantized_part import Format, Part, Shapes, padded_columns
from trtspec.ops.packing import GROUP_SIZES, pack_int4, pack_int8

logger = logging.getLogger(__name__)

IntegerPart: TypeAlias = Part[IntegerScheme]
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # places of outputs 0..7 in a word
_LARGEST_STEPS = {4: 15, 8: 128}  # bits of a weight -> the most scales that it may amount to


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of integers with the scales and zero points of its groups.

    values [N, K]: uint8 0..15, or int8.
    scales, zeros: one for each group, [N, G]; zeros None = 8 (int8: 0).
    order [K] int64: input i of the matrix is input order[i] of the linear; None = i.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None


class Integers(Format[IntegerScheme]):
    """The format of integer weights that the module's docstring describes.

    One object serves all linears of a model and counts their rounded scales.
    """

    def __init__(self) -> None:
        self._rounding = _Rounding()

    def problem(self, part: IntegerPart) -> str | None:
        """Reason why the linear's outputs or inputs do not fill words or groups; None = they do."""
        (N, K), word = part.slot.shape, 32 // part.scheme.bits
        if part.scheme.layout == "awq" and N % word:
            return f"its {N} outputs do not fill int32 words of {word}"
        if part.scheme.layout == "gptq" and (N % word or K % word):
            return f"its {N} outputs and {K} inputs do not fill int32 words of {word}"
        if K % _group_size(part):
            return f"its {K} inputs are no multiple of its groups of {_group_size(part)}"
        if part.scheme.bits == 4 and _group_size(part) % min(GROUP_SIZES):
            return f"{K} inputs with one scale are not a multiple of {min(GROUP_SIZES)}"
        return None

    def shapes(self, part: IntegerPart) -> tuple[Shapes, Shapes]:
        """Shapes of the tensors of the scheme's layout. g_idx is optional in gptq unless the scheme is ordered."""
        (N, K), word, bits, scheme = part.slot.shape, 32 // part.scheme.bits, part.scheme.bits, part.scheme
        G = K // _group_size(part)
        if scheme.layout == "gptq":
            shapes: Shapes = {"qweight": (K // word, N), "qzeros": (G, N // word), "scales": (G, N)}
        elif scheme.layout == "awq":
            shapes = {"qweight": (K, N // word), "qzeros": (G, N // word), "scales": (G, N)}
        else:
            packed = scheme.layout == "pack-quantized"
            shapes = {"weight_scale": (N, G)}
            shapes |= {"weight_packed": (N, -(-K * bits // 32)), "weight_shape": (2,)} if packed else {"weight": (N, K)}
            if not scheme.symmetric:
                shapes["weight_zero_point"] = (-(-N * bits // 32) if packed else N, G)
        order: Shapes = {_order_name(part): (K,)}
        if scheme.ordered:
            return shapes | order, {}
        return shapes, order if scheme.layout == "gptq" else {}

    def misfit(self, part: IntegerPart, kind: str, tensor: Tensor) -> str | None:
        """Dtype that the tensor should have, if it has another; None = it fits."""
        if kind in ("scales", "weight_scale"):
            return None if tensor.is_floating_point() else "floating-point numbers"
        if kind in ("weight_shape", "g_idx", "weight_g_idx"):
            return None if tensor.dtype in (torch.int32, torch.int64) else "int32 or int64"
        expected = torch.int8 if part.scheme.layout == "int-quantized" else torch.int32
        return None if tensor.dtype == expected else str(expected).removeprefix("torch.")

    def describe(self, linear: Linear, parts: Sequence[IntegerPart]) -> None:
        """Give the linear panels, scales, zeros and an order on torch's meta device."""
        N, K = sum(part.slot.shape[0] for part in parts), parts[0].slot.shape[1]
        values = torch.empty(N, K, dtype=torch.int8, device="meta")
        order = values[0].long() if any(part.scheme.ordered and _group_size(part) < K for part in parts) else None
        if not _is_grouped(parts[0]):
            linear.hold(*pack_int8(values, values[:, 0]), order=order)
            return
        scales = values[:, : K // min(map(_held_group_size, parts))].half()
        if parts[0].scheme.bits == 8:
            linear.hold(*pack_int8(values, scales), order=order)
            return
        zeros = None if all(part.scheme.symmetric for part in parts) else scales.byte()
        linear.hold(*pack_int4(values.byte(), scales, zeros), order=order)

    def num_bytes(self, parts: Sequence[IntegerPart]) -> int:
        """Bytes of the padded panels, of their scales and of zero points, where there are some."""
        K = parts[0].slot.shape[1]
        if not _is_grouped(parts[0]):
            return padded_columns(parts) * (-(-K // 4) * 4 + 4)
        groups = K // min(map(_held_group_size, parts))
        if parts[0].scheme.bits == 8:
            return padded_columns(parts) * (K + groups * 2)
        return padded_columns(parts) * (K // 2 + groups * (2 if all(part.scheme.symmetric for part in parts) else 3))

    def finish(self, where: str) -> None:
        """Warn if scales did not fit fp16 and were rounded."""
        if (rounding := self._rounding).count:
            logger.warning(
                "%s: %d scales do not fit fp16 and were rounded; a weight moves by at most %.2g, a scale by %.2g of "
                "its value",
                where,
                rounding.count,
                rounding.most,
                rounding.most_relative,
            )

    def hold(self, linear: Linear, parts: Sequence[IntegerPart], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Pack the parts' tensors. CheckpointError for tensors that contradict the scheme or each other.

        UnsupportedError if the parts have their inputs in different orders, if fp16 cannot hold a scale, or if the
        meaning of zero points is ambiguous.
        """
        matrices = [_matrix(part, given) for part, given in zip(parts, tensors, strict=True)]
        first = matrices[0]
        for matrix in matrices[1:]:
            same = matrix.order is first.order or (
                matrix.order is not None and first.order is not None and torch.equal(matrix.order, first.order)
            )
            if not same:
                raise parts[0].unsupported(
                    "have their inputs in different orders (g_idx), but they are one matrix here",
                    "quantise without desc_act",
                    ", ".join(part.name for part in parts),
                )
        values = torch.cat([matrix.values for matrix in matrices])
        if not _is_grouped(parts[0]):
            linear.hold(*pack_int8(values, torch.cat([matrix.scales[:, 0] for matrix in matrices])), order=first.order)
            return
        size = min(map(_held_group_size, parts))
        repeats = [values.shape[1] // size // matrix.scales.shape[1] for matrix in matrices]
        scales = torch.cat([m.scales.repeat_interleave(r, dim=1) for m, r in zip(matrices, repeats, strict=True)])
        zeros = None
        if any(matrix.zeros is not None for matrix in matrices):
            known = [torch.full(m.scales.shape, 8, dtype=torch.uint8) if m.zeros is None else m.zeros for m in matrices]
            zeros = torch.cat([z.repeat_interleave(r, dim=1) for z, r in zip(known, repeats, strict=True)])
        half = scales.to(torch.float16)
        if not half.isfinite().all():
            raise parts[0].unsupported(f"has a scale of {float(scales.abs().max()):.3g}, more than fp16's 65504")
        self._rounding.add(scales, half, _LARGEST_STEPS[parts[0].scheme.bits])
        if values.dtype == torch.int8:
            linear.hold(*pack_int8(values, half), order=first.order)
        else:
            linear.hold(*pack_int4(values, half, zeros), order=first.order)


def _group_size(part: IntegerPart) -> int:
    """Number of inputs that share a scale in the checkpoint."""
    return part.scheme.group_size or part.slot.shape[1]


def _is_grouped(part: IntegerPart) -> bool:
    """Whether our layout has scales of groups, as it has for all 4-bit weights."""
    return part.scheme.bits == 4 or part.scheme.group_size is not None


def _held_group_size(part: IntegerPart) -> int:
    """Number of inputs that share a scale in our layout, 32, 64 or 128: scales of larger groups are repeated."""
    return max(size for size in GROUP_SIZES if _group_size(part) % size == 0)


def _order_name(part: IntegerPart) -> str:
    return "g_idx" if part.scheme.layout == "gptq" else "weight_g_idx"


def _matrix(part: IntegerPart, tensors: Mapping[str, Tensor]) -> IntegerMatrix:
    matrix = _READERS[part.scheme.layout](tensors, part)
    if not matrix.scales.isfinite().all():
        raise part.damaged("has scales that are not finite")
    if "weight_shape" in tensors and tuple(tensors["weight_shape"].tolist()) != part.slot.shape:
        raise part.damaged(f"has weight_shape {tensors['weight_shape'].tolist()}, not {part.slot.shape}")
    if part.scheme.layout == "int-quantized" and part.scheme.bits == 4 and int(matrix.values.max()) > 15:
        raise part.damaged("has weights that are not of 4 bits")
    zeros = _zeros(part, matrix.zeros)
    g_idx = tensors.get(_order_name(part))
    order = None if g_idx is None else _order(part, g_idx)
    return IntegerMatrix(matrix.values if order is None else matrix.values[:, order], matrix.scales, zeros, order)


def _zeros(part: IntegerPart, zeros: Tensor | None) -> Tensor | None:
    """Check the zero points and return them; None for symmetric weights, whose zero points are known."""
    if zeros is None:
        return None
    middle = 1 << (part.scheme.bits - 1)
    if part.scheme.symmetric:
        if (zeros != middle).any():
            found = int(zeros[zeros != middle][0])
            raise part.damaged(f"is symmetric, but has zero point {found} (for {middle}); see checkpoint_format")
        return None
    if int(zeros.max()) > 15 and part.scheme.layout == "gptq":
        raise part.unsupported(
            "has zero points stored as 15 in format gptq, which some programs read as 0 and some as 16",
            "save it in checkpoint_format gptq_v2",
        )
    if int(zeros.max()) > 15:
        raise part.damaged("has zero points that are not of 4 bits")
    return zeros


def _order(part: IntegerPart, g_idx: Tensor) -> Tensor | None:
    """Sort inputs by group: from the group of each input, the inputs group by group. None if they are in order."""
    groups = part.slot.shape[1] // _group_size(part)
    known = int(g_idx.min()) >= 0 and int(g_idx.max()) < groups
    if not known or (g_idx.long().bincount(minlength=groups) != _group_size(part)).any():
        raise part.damaged(f"has a {_order_name(part)} that does not give each group {_group_size(part)} inputs")
    return g_idx.long().argsort(stable=True) if (g_idx.diff() < 0).any() else None


class _Rounding:
    """A record of how far scales, and weights with them, moved when they became fp16."""

    def __init__(self) -> None:
        self.count, self.most, self.most_relative = 0, 0.0, 0.0

    def add(self, scales: Tensor, half: Tensor, steps: int) -> None:
        """Count the scales that changed. steps: the most scales that a weight may amount to."""
        errors = (half.double() - scales.double()).abs()
        moved = errors > 0
        if moved.any():
            self.count += int(moved.sum())
            self.most = max(self.most, steps * float(errors.max()))
            self.most_relative = max(self.most_relative, float((errors[moved] / scales[moved].double().abs()).max()))


# -- layouts: tensors by the last part of their names -> IntegerMatrix as stored ---------------------------------------


def _fields(words: Tensor, bits: int) -> Tensor:
    """[R, C] int32 -> [R, C * 32 / bits] uint8; the lowest bits of a word come first."""
    # contiguous() may leave a stride on a single column
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _signed(values: Tensor, bits: int) -> Tensor:
    """Unsigned 8-bit values around 128 -> int8 around 0; 4-bit values stay as they are."""
    return (values ^ 128).view(torch.int8) if bits == 8 else values


def _pack_quantized(tensors: Mapping[str, Tensor], part: IntegerPart) -> IntegerMatrix:
    (N, K), bits = part.slot.shape, part.scheme.bits
    values = _signed(_fields(tensors["weight_packed"], bits)[:, :K], bits)
    zeros = tensors.get("weight_zero_point")
    return IntegerMatrix(
        values, tensors["weight_scale"], None if zeros is None else _fields(zeros.T, bits)[:, :N].T, None
    )


def _int_quantized(tensors: Mapping[str, Tensor], part: IntegerPart) -> IntegerMatrix:
    values, zeros = tensors["weight"], tensors.get("weight_zero_point")
    if part.scheme.bits == 4:  # below -8 becomes more than 15
        values = (values + 8).view(torch.uint8)
        zeros = None if zeros is None else (zeros + 8).view(torch.uint8)
    return IntegerMatrix(values, tensors["weight_scale"], zeros, None)


def _gptq(tensors: Mapping[str, Tensor], part: IntegerPart) -> IntegerMatrix:
    bits = part.scheme.bits
    values = _signed(_fields(tensors["qweight"].T, bits), bits)
    zeros = _fields(tensors["qzeros"], bits) + part.scheme.zero_offset
    return IntegerMatrix(values, tensors["scales"].T, zeros.T, None)


def _awq(tensors: Mapping[str, Tensor], part: IntegerPart) -> IntegerMatrix:
    def outputs(words: Tensor) -> Tensor:
        stored = _fields(words, 4)
        return stored.view(len(stored), -1, len(_AWQ_PLACES))[:, :, list(_AWQ_PLACES)].flatten(1).T

    return IntegerMatrix(outputs(tensors["qweight"]), tensors["scales"].T, outputs(tensors["qzeros"]), None)


_READERS = {"pack-quantized": _pack_quantized, "int-quantized": _int_quantized, "gptq": _gptq, "awq": _awq}
