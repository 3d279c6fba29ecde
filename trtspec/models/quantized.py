"""Weights that are integers already in the checkpoint: public layouts to ours, value by value, nothing is rounded anew.

Tensors of a linear [N, K] with a scale for every g of its K inputs (G = K / g; 1 for a scale per output channel), w
values to an int32 word, the first in the lowest bits:

    pack-quantized   weight_packed [N, ceil(K/w)], weight_scale [N, G], weight_shape [2] = (N, K), and without symmetry
                     weight_zero_point [ceil(N/w), G]; values and zero points are offset by half the range
    int-quantized    weight [N, K] int8, weight_scale [N, G], and without symmetry weight_zero_point [N, G] int8
    gptq             qweight [K/w, N], qzeros [G, N/w] (in format "gptq" one less than they are), scales [G, N],
                     g_idx [K] (the group of each input; if they are not in order, the linear sorts its inputs)
    awq              qweight [K, N/8], qzeros [G, N/8], scales [G, N]; a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7

Sources: `pack_to_int32` of vllm-project/compressed-tensors, AutoGPTQ's QuantLinear.pack, AutoAWQ's WQLinear_GEMM.

Scales become fp16 for 4-bit weights. Those of fp16 and, from 2^-17 (7.6e-6) to 65504, of bf16 do so exactly; others
are rounded, by at most 2^-11 of their value or, below 2^-14, by 2^-25, with a warning that says how far weights moved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from trtspec.config.quantized import CheckpointQuantization, WeightScheme
from trtspec.errors import CheckpointError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.models.layers import Linear
from trtspec.models.slots import Slot
from trtspec.ops.packing import GROUP_SIZES, PANEL, pack_int4, pack_int8

logger = logging.getLogger(__name__)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0..7 in a word
_LARGEST_STEPS = 15  # a 4-bit weight is at most so many scales


@dataclass(frozen=True)
class Part:
    """A quantised linear of the checkpoint, and the rows of ours that it is."""

    name: str
    scheme: WeightScheme
    slot: Slot

    @property
    def group_size(self) -> int:
        """Inputs that share a scale in the checkpoint."""
        return self.scheme.group_size or self.slot.shape[1]

    @property
    def held_group_size(self) -> int:
        """The same where ours repeats scales, as its groups are of 32, 64 or 128."""
        return max(size for size in GROUP_SIZES if self.group_size % size == 0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors it must have, by name."""
        (N, K), word, bits = self.slot.shape, 32 // self.scheme.bits, self.scheme.bits
        G = K // self.group_size
        if self.scheme.layout == "gptq":
            shapes: dict[str, tuple[int, ...]] = {"qweight": (K // word, N), "qzeros": (G, N // word), "scales": (G, N)}
        elif self.scheme.layout == "awq":
            shapes = {"qweight": (K, N // word), "qzeros": (G, N // word), "scales": (G, N)}
        else:
            packed = self.scheme.layout == "pack-quantized"
            shapes = {"weight_scale": (N, G)}
            shapes |= {"weight_packed": (N, -(-K * bits // 32)), "weight_shape": (2,)} if packed else {"weight": (N, K)}
            if not self.scheme.symmetric:
                shapes["weight_zero_point"] = (-(-N * bits // 32) if packed else N, G)
        if self.scheme.ordered:
            shapes[self.order_name] = (K,)
        return {f"{self.name}.{name}": shape for name, shape in shapes.items()}

    @property
    def order_name(self) -> str:
        return "g_idx" if self.scheme.layout == "gptq" else "weight_g_idx"

    def problem(self) -> str | None:
        """What keeps it from being held as it is, by its shape alone."""
        (N, K), word = self.slot.shape, 32 // self.scheme.bits
        if self.scheme.layout == "awq" and N % word:
            return f"its {N} outputs do not fill int32 words of {word}"
        if self.scheme.layout == "gptq" and (N % word or K % word):
            return f"its {N} outputs and {K} inputs do not fill int32 words of {word}"
        if K % self.group_size:
            return f"its {K} inputs are no multiple of its groups of {self.group_size}"
        if self.scheme.bits == 4 and self.group_size % min(GROUP_SIZES):
            return f"{K} inputs with one scale are not a multiple of {min(GROUP_SIZES)}"
        return None


@dataclass(frozen=True)
class IntegerMatrix:
    """values [N, K]: uint8 0..15, or int8; a scale and zero point for each group [N, G]; zeros None = 8 (int8: 0).

    order [K] int64: input i of the matrix is input order[i] of the linear; None = i.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None


class QuantizedLinears:
    """What of a model's `slots` is quantised in its checkpoint. Linears are packed as soon as their tensors are there.

    plain: the other slots. required, optional: shapes of the quantised linears' tensors, by name. `where` begins
    errors. Raises UnsupportedError for a linear whose weights ours cannot hold as they are.
    """

    def __init__(self, slots: Mapping[str, Slot], quantization: CheckpointQuantization | None, where: str) -> None:
        self.where = where
        self.plain: dict[str, Slot] = {}
        self.required: dict[str, tuple[int, ...]] = {}
        self.optional: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[Part]] = {}  # by our parameter
        self._modules: dict[str, str] = {}  # linear of the checkpoint -> our parameter
        self._awaited: dict[str, set[str]] = {}  # our parameter, until it is packed -> tensors that may yet come for it
        self._tensors: dict[str, Tensor] = {}  # those that came for parameters that are not packed yet
        self._rounding = _Rounding()
        self._error: TrtSpecError | None = None
        for name, slot in slots.items():
            module, _, kind = name.rpartition(".")
            linear = kind == "weight" and len(slot.shape) == 2 and not slot.parameter.endswith("embedding.weight")
            scheme = quantization.scheme(module) if quantization is not None and linear else None
            if scheme is None:
                self.plain[name] = slot
                continue
            part = Part(module, scheme, slot)
            if problem := part.problem():
                raise self._unsupported(module, f"is {scheme}, but {problem}")
            self._parts.setdefault(slot.parameter, []).append(part)
            self._modules[module] = slot.parameter
            shapes, optional = part.shapes(), {}
            if not scheme.ordered and scheme.layout == "gptq":
                optional[f"{module}.{part.order_name}"] = (slot.shape[1],)
            self.required |= shapes
            self.optional |= optional
            self._awaited.setdefault(slot.parameter, set()).update(shapes, optional)
        self._check_fused()

    def ignorable(self, name: str, tensor: Tensor) -> bool:
        """Early GPTQ writers gave every linear a bias, of zeros where the model has none."""
        return self.is_spare_bias(name) and not tensor.any()

    def is_spare_bias(self, name: str) -> bool:
        """Whether it is one of those, if it is of zeros."""
        module, _, kind = name.rpartition(".")
        return kind == "bias" and module in self._modules

    def take(self, name: str, tensor: Tensor, into: nn.Module) -> None:
        """One of the tensors, in its right shape. The last one that a linear of the module `into` awaited packs it.

        WeightsError if it is of no fitting dtype.
        """
        module, _, kind = name.rpartition(".")
        if kind in ("scales", "weight_scale"):
            fits, wanted = tensor.is_floating_point(), "floating-point numbers"
        elif kind in ("weight_shape", "g_idx", "weight_g_idx"):
            fits, wanted = tensor.dtype in (torch.int32, torch.int64), "int32 or int64"
        else:
            beside = name.replace("weight_zero_point", "weight_packed")  # zero points are packed where values are
            words = kind in ("qweight", "qzeros") or (beside.endswith(".weight_packed") and beside in self.required)
            expected = torch.int32 if words else torch.int8
            fits, wanted = tensor.dtype == expected, str(expected).removeprefix("torch.")
        if not fits:
            raise WeightsError(f"{self.where}: {name} is {tensor.dtype}, expected {wanted}; download the file again")
        parameter = self._modules[module]
        awaited = self._awaited.get(parameter)
        if awaited is None:
            return  # another shard has it too, and the linear is packed
        self._tensors[name] = tensor
        awaited.discard(name)
        if not awaited:
            self._pack(parameter, into)

    def finish(self, module: nn.Module) -> None:
        """Pack those that have all but an optional tensor, which will not come.

        UnsupportedError or CheckpointError for values nobody can hold, in any linear.
        """
        for parameter in [*self._awaited]:
            self._pack(parameter, module)
        if self._error is not None:
            raise self._error
        if (rounding := self._rounding).count:
            logger.warning(
                "%s: %d scales do not fit fp16 and were rounded; a weight moves by at most %.2g, a scale by %.2g of "
                "its value",
                self.where,
                rounding.count,
                _LARGEST_STEPS * rounding.most,
                rounding.most_relative,
            )

    def describe(self, module: nn.Module) -> None:
        """Give the linears of `module` that are quantised the tensors they will hold, on torch's meta device."""
        for parameter, parts in self._parts.items():
            linear = cast(Linear, module.get_submodule(parameter.removesuffix(".weight")))
            N, K = sum(part.slot.shape[0] for part in parts), parts[0].slot.shape[1]
            values = torch.empty(N, K, dtype=torch.int8, device="meta")
            sorts = any(part.scheme.ordered and part.group_size < K for part in parts)
            order = values[0].long() if sorts else None
            if parts[0].scheme.bits == 8:
                linear.hold(*pack_int8(values, values[:, 0]), order=order)
                continue
            scales = values[:, : K // min(part.held_group_size for part in parts)].half()
            zeros = None if all(part.scheme.symmetric for part in parts) else scales.byte()
            linear.hold(*pack_int4(values.byte(), scales, zeros), order=order)

    def num_bytes(self, itemsize: int) -> int:
        """Of all weights once they are loaded, those in floating point at `itemsize` bytes."""
        total = sum(torch.Size(slot.shape).numel() for slot in self.plain.values()) * itemsize
        for parts in self._parts.values():
            K, bits = parts[0].slot.shape[1], parts[0].scheme.bits
            columns = -(-sum(part.slot.shape[0] for part in parts) // PANEL) * PANEL
            if bits == 8:
                total += columns * (-(-K // 4) * 4 + 4)
            else:
                groups = K // min(part.held_group_size for part in parts)
                total += columns * (K // 2 + groups * (2 if all(part.scheme.symmetric for part in parts) else 3))
        return total

    def _pack(self, parameter: str, module: nn.Module) -> None:
        """An error waits for `finish`: if tensors are missing or mis-shaped, the caller has that to say first."""
        del self._awaited[parameter]
        linear = cast(Linear, module.get_submodule(parameter.removesuffix(".weight")))
        parts = self._parts[parameter]
        try:
            matrices = [self._matrix(part) for part in sorted(parts, key=lambda part: part.slot.start)]
            self._hold(linear, parts, matrices)
        except TrtSpecError as error:
            self._error = self._error or error

    def _check_fused(self) -> None:
        """Linears that are one matrix here must be of one kind."""
        for name, slot in self.plain.items():
            if slot.parameter in self._parts:
                part = self._parts[slot.parameter][0]
                module = name.rpartition(".")[0]
                raise self._unsupported(
                    part.name, f"is {part.scheme} and {module} is not, but they are one matrix here"
                )
        for first, *others in self._parts.values():
            for part in others:
                if part.scheme.bits != first.scheme.bits:
                    raise self._unsupported(
                        first.name, f"is {first.scheme} and {part.name} {part.scheme}, but they are one matrix here"
                    )

    def _matrix(self, part: Part) -> IntegerMatrix:
        names = {*part.shapes(), f"{part.name}.{part.order_name}"} & self._tensors.keys()
        tensors = {name.rpartition(".")[2]: self._tensors.pop(name) for name in names}
        matrix = _READERS[part.scheme.layout](tensors, part)
        if not matrix.scales.isfinite().all():
            raise self._damaged(part, "has scales that are not finite")
        if "weight_shape" in tensors and tuple(tensors["weight_shape"].tolist()) != part.slot.shape:
            raise self._damaged(part, f"has weight_shape {tensors['weight_shape'].tolist()}, not {part.slot.shape}")
        if part.scheme.layout == "int-quantized" and part.scheme.bits == 4 and int(matrix.values.max()) > 15:
            raise self._damaged(part, "has weights that are not of 4 bits")
        zeros = self._zeros(part, matrix.zeros)
        g_idx = tensors.get(part.order_name)
        order = None if g_idx is None else self._order(part, g_idx)
        return IntegerMatrix(matrix.values if order is None else matrix.values[:, order], matrix.scales, zeros, order)

    def _zeros(self, part: Part, zeros: Tensor | None) -> Tensor | None:
        """Without those of symmetric weights, which say what is known."""
        if zeros is None:
            return None
        middle = 1 << (part.scheme.bits - 1)
        if part.scheme.symmetric:
            if (zeros != middle).any():
                found = int(zeros[zeros != middle][0])
                raise self._damaged(
                    part, f"is symmetric, but has zero point {found} (for {middle}); see checkpoint_format"
                )
            return None
        if int(zeros.max()) > 15 and part.scheme.layout == "gptq":
            raise self._unsupported(
                part.name,
                "has zero points stored as 15 in format gptq, which some programs read as 0 and some as 16",
                "save it in checkpoint_format gptq_v2",
            )
        if int(zeros.max()) > 15:
            raise self._damaged(part, "has zero points that are not of 4 bits")
        return zeros

    def _order(self, part: Part, g_idx: Tensor) -> Tensor | None:
        """From the group of each input, the inputs group by group."""
        groups = part.slot.shape[1] // part.group_size
        known = int(g_idx.min()) >= 0 and int(g_idx.max()) < groups
        if not known or (g_idx.long().bincount(minlength=groups) != part.group_size).any():
            raise self._damaged(part, f"has a {part.order_name} that does not give each group {part.group_size} inputs")
        return g_idx.long().argsort(stable=True) if (g_idx.diff() < 0).any() else None

    def _hold(self, linear: Linear, parts: list[Part], matrices: list[IntegerMatrix]) -> None:
        first = matrices[0]
        for matrix in matrices[1:]:
            same = matrix.order is first.order or (
                matrix.order is not None and first.order is not None and torch.equal(matrix.order, first.order)
            )
            if not same:
                raise self._unsupported(
                    ", ".join(part.name for part in parts),
                    "have their inputs in different orders (g_idx), but they are one matrix here",
                    "quantise without desc_act",
                )
        values = torch.cat([matrix.values for matrix in matrices])
        if values.dtype == torch.int8:
            linear.hold(*pack_int8(values, torch.cat([matrix.scales[:, 0] for matrix in matrices])), order=first.order)
            return
        size = min(part.held_group_size for part in parts)
        repeats = [values.shape[1] // size // matrix.scales.shape[1] for matrix in matrices]
        scales = torch.cat([m.scales.repeat_interleave(r, dim=1) for m, r in zip(matrices, repeats, strict=True)])
        zeros = None
        if any(matrix.zeros is not None for matrix in matrices):
            known = [torch.full(m.scales.shape, 8, dtype=torch.uint8) if m.zeros is None else m.zeros for m in matrices]
            zeros = torch.cat([z.repeat_interleave(r, dim=1) for z, r in zip(known, repeats, strict=True)])
        half = scales.to(torch.float16)
        if not half.isfinite().all():
            raise self._unsupported(
                parts[0].name, f"has a scale of {float(scales.abs().max()):.3g}, more than fp16's 65504"
            )
        self._rounding.add(scales, half)
        linear.hold(*pack_int4(values, half, zeros), order=first.order)

    def _unsupported(self, module: str, problem: str, remedy: str | None = None) -> UnsupportedError:
        remedy = remedy or "use a checkpoint that is quantised otherwise, or the unquantised one with quantization="
        return UnsupportedError(f"{self.where}: {module} {problem}; {remedy}")

    def _damaged(self, part: Part, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {part.name} {problem}; download it again, or quantise it anew")


class _Rounding:
    """How far scales moved on their way to fp16."""

    def __init__(self) -> None:
        self.count, self.most, self.most_relative = 0, 0.0, 0.0

    def add(self, scales: Tensor, half: Tensor) -> None:
        errors = (half.double() - scales.double()).abs()
        moved = errors > 0
        if moved.any():
            self.count += int(moved.sum())
            self.most = max(self.most, float(errors.max()))
            self.most_relative = max(self.most_relative, float((errors[moved] / scales[moved].double().abs()).max()))


# -- layouts: tensors by their last name -> IntegerMatrix as it is stored ----------------------------------------------


def _fields(words: Tensor, bits: int) -> Tensor:
    """[R, C] int32 -> [R, C * 32 / bits] uint8, the lowest bits of a word first."""
    # contiguous() may leave a stride to a single column
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _signed(values: Tensor, bits: int) -> Tensor:
    """Unsigned 8-bit values around 128 -> int8 around 0; 4-bit ones stay."""
    return (values ^ 128).view(torch.int8) if bits == 8 else values


def _pack_quantized(tensors: Mapping[str, Tensor], part: Part) -> IntegerMatrix:
    (N, K), bits = part.slot.shape, part.scheme.bits
    values = _signed(_fields(tensors["weight_packed"], bits)[:, :K], bits)
    zeros = tensors.get("weight_zero_point")
    return IntegerMatrix(
        values, tensors["weight_scale"], None if zeros is None else _fields(zeros.T, bits)[:, :N].T, None
    )


def _int_quantized(tensors: Mapping[str, Tensor], part: Part) -> IntegerMatrix:
    values, zeros = tensors["weight"], tensors.get("weight_zero_point")
    if part.scheme.bits == 4:  # below -8 becomes more than 15
        values = (values + 8).view(torch.uint8)
        zeros = None if zeros is None else (zeros + 8).view(torch.uint8)
    return IntegerMatrix(values, tensors["weight_scale"], zeros, None)


def _gptq(tensors: Mapping[str, Tensor], part: Part) -> IntegerMatrix:
    bits = part.scheme.bits
    values = _signed(_fields(tensors["qweight"].T, bits), bits)
    zeros = _fields(tensors["qzeros"], bits) + part.scheme.zero_offset
    return IntegerMatrix(values, tensors["scales"].T, zeros.T, None)


def _awq(tensors: Mapping[str, Tensor], part: Part) -> IntegerMatrix:
    def outputs(words: Tensor) -> Tensor:
        stored = _fields(words, 4)
        return stored.view(len(stored), -1, len(_AWQ_PLACES))[:, :, list(_AWQ_PLACES)].flatten(1).T

    return IntegerMatrix(outputs(tensors["qweight"]), tensors["scales"].T, outputs(tensors["qzeros"]), None)


_READERS = {"pack-quantized": _pack_quantized, "int-quantized": _int_quantized, "gptq": _gptq, "awq": _awq}
