"""The small modules of a decoder: linear, norm, rotary positions, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.config.checkpoint.model import RopeConfig
from trtspec.models.specs import DecoderSpec
from trtspec.ops import (
    packed_embedding,
    packed_linear,
    packed_swiglu,
    packing,
    rms_norm,
    rms_norm_inline,
    silu_mul_inline,
)

QUANTIZATIONS = {None: 0, "int8": 0, "int4": 32, "int4_g64": 64, "int4_g128": 128}
"""Ways in which `Linear.pack` stores a weight -> inputs of a group; 0 = no groups."""

_UNALLOCATED: ContextVar[torch.dtype | None] = ContextVar("_UNALLOCATED", default=None)  # dtype given to `unallocated`


def _unloaded(*shape: int) -> nn.Parameter:
    """Create a weight filled with NaN, so that a missed load shows. It is fp32, unless within `unallocated`."""
    dtype = _UNALLOCATED.get()
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype, device=None if dtype is None else "meta"))


@contextmanager
def unallocated(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, modules get weights of `dtype` on torch's meta device. They take no memory until `allocate`.

    Buffers, such as the rotary table, are created as usual. This is for loaders, which know which weights will not be
    kept as they are built.
    """
    token = _UNALLOCATED.set(dtype)
    try:
        yield
    finally:
        _UNALLOCATED.reset(token)


def allocate(weight: nn.Parameter) -> None:
    """Allocate memory, filled with NaN, for a weight that has none. Modules that share the weight go on sharing it."""
    if weight.is_meta:
        nans = nn.Parameter(torch.full(weight.shape, float("nan"), dtype=weight.dtype))
        torch.utils.swap_tensors(weight, nans)  # type: ignore[no-untyped-call]


class Linear(nn.Module):
    """A linear layer, x [T, K] -> [T, N].

    In eval mode a row's bits do not depend on other rows. In training it uses autograd's linear instead.
    float_out: results are fp32, as accumulated, whatever x's dtype (an lm_head's logits).
    """

    scales: Tensor  # of a quantised weight; no elements otherwise
    zeros: Tensor  # of a quantised weight; no elements otherwise
    x_scale: Tensor  # [1] fp32: fp8 weights take x as multiples of it; no elements: x as it is
    order: Tensor  # [K] int64: the weight's inputs are x[:, order]; no elements: x as it is

    def __init__(self, in_features: int, out_features: int, bias: bool, float_out: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.float_out = in_features, out_features, float_out
        self.weight = _unloaded(out_features, in_features)
        self.bias = _unloaded(out_features) if bias else None
        self.register_buffer("scales", torch.empty(0), persistent=False)
        self.register_buffer("zeros", torch.empty(0), persistent=False)
        self.register_buffer("x_scale", torch.empty(0), persistent=False)
        self.register_buffer("order", torch.empty(0, dtype=torch.int64), persistent=False)

    @property
    def is_packed(self) -> bool:
        return self.weight.ndim != 2

    def pack(self, quantization: str | None = None) -> None:
        """Replace the weight by panels (layouts of ops.packing), in its own dtype or quantised.

        Do this last: `.to(dtype)` would convert scales, and a packed linear cannot be trained again.
        quantization: None, "int8", "int4" (groups of 32), "int4_g64" or "int4_g128".
        """
        if self.is_packed:
            raise ValueError("this linear is packed already")
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization {quantization!r}: want None or one of {[*QUANTIZATIONS][1:]}")
        weight = self.weight.detach()
        if quantization is None:
            panels = packing.pack_panels(weight)
        elif quantization == "int8":
            panels, self.scales = packing.quantize_int8(weight)
        else:
            panels, self.scales, self.zeros = packing.quantize_int4(weight, QUANTIZATIONS[quantization])
        self.weight = nn.Parameter(panels, requires_grad=False)

    def hold(
        self,
        panels: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
        x_scale: Tensor | None = None,
    ) -> None:
        """Replace the weight by one that is packed already, in one of the quantised layouts of ops.packing."""
        self.weight, self.scales = nn.Parameter(panels, requires_grad=False), scales
        for name, given in (("zeros", zeros), ("order", order), ("x_scale", x_scale)):
            if given is not None:
                setattr(self, name, given)

    @property
    def quantization_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that belong to a quantised weight: scales, zeros, x_scale, order."""
        return self.scales, self.zeros, self.x_scale, self.order

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_packed:
            out = F.linear(x, self.weight, self.bias)
            return out.float() if self.float_out else out
        return packed_linear(self._ordered(x), float_out=self.float_out, **self._weight())

    def swiglu(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up of the layer's results, whose first half are gates: [T, K] -> [T, N / 2]."""
        return packed_swiglu(self._ordered(x), **self._weight())

    def _ordered(self, x: Tensor) -> Tensor:
        return x[:, self.order] if self.order.numel() else x

    def _weight(self) -> dict[str, Any]:
        """Arguments of the ops, other than x."""
        return {
            "weight": self.weight,
            "bias": self.bias,
            "scales": self.scales,
            "zeros": self.zeros,
            "x_scale": self.x_scale if self.x_scale.numel() else None,
            "out_features": self.out_features,
        }


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of a packed head's matrix: ids [n] -> [n, H].

    It is for a decoder that ties its embedding to its head.
    """

    def __init__(self, head: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = head, dtype  # dtype of the rows

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        head = self.head
        return packed_embedding(ids, head.weight, head.scales, head.zeros, head.in_features).to(self.dtype)


def weight_bytes(*modules: nn.Module) -> int:
    """Bytes of all weights of `modules`, including scales and the like of quantised ones. Shared tensors count once."""
    tensors: dict[int, int] = {}
    for module in modules:
        for parameter in module.parameters():
            tensors[id(parameter)] = parameter.nbytes
        for part in module.modules():
            if isinstance(part, Linear):
                tensors |= {id(tensor): tensor.nbytes for tensor in part.quantization_tensors}
    return sum(tensors.values())


class RMSNorm(nn.Module):
    """A norm, x / rms(x) * weight over the last dimension: computed in fp32, weighted in x's dtype.

    constant: every element of the weight is that number, and the weight is no parameter.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, constant: float | None = None) -> None:
        super().__init__()
        if constant is None:
            self.weight = _unloaded(size)
        else:
            self.register_buffer("weight", torch.full((size,), constant, dtype=_UNALLOCATED.get()), persistent=False)
        self.eps = eps
        self.is_op = False  # `models.attention.as_ops` sets it; ops/norm.py says where

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != x.dtype:  # a constant in training, which casts parameters only
            weight = weight.to(x.dtype)
        return (rms_norm if self.is_op else rms_norm_inline)(x, weight, self.eps)


class GatedMLP(nn.Module):
    """A gated MLP, down(silu(gate(x)) * up(x)), with gate and up as one matrix of 2*I rows."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias)
        self.is_op = False  # as in RMSNorm

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up.swiglu(x) if self.is_op else silu_mul_inline(self.gate_up(x)))  # type: ignore[no-any-return]


class RotaryTable(nn.Module):
    """A table of cos and sin of every position, [max_position, D] fp32 each, looked up by position.

    Frequencies are those of transformers' rope types, with one difference for `dynamic`. There transformers stretches a
    whole forward pass by its longest position, which would make a row depend on its neighbours. Here, a position p past
    the original length is stretched as the last token of a sequence of p + 1 tokens. That is what token-by-token
    decoding gives.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        self.cos: Tensor
        self.sin: Tensor
        if torch.get_default_device().type == "meta":  # arithmetic on meta imports torch's compiler, for seconds
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(max_position, head_dim), persistent=False)
            return
        positions = torch.arange(max_position, dtype=torch.float32)
        if rope.rope_type == "dynamic":
            angles = positions[:, None] * _dynamic_frequencies(rope, head_dim, positions)
        else:
            angles = positions[:, None] * _inverse_frequencies(rope, head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos() * rope.attention_factor, persistent=False)
        self.register_buffer("sin", angles.sin() * rope.attention_factor, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, 1, D] in `dtype` of positions [T]. Positions past the table read its last row (junk rows)."""
        positions = positions.clamp(max=self.cos.shape[0] - 1)
        return self.cos[positions].to(dtype)[:, None], self.sin[positions].to(dtype)[:, None]


def _powers(theta: float, head_dim: int) -> Tensor:
    return torch.pow(theta, torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, [D/2] fp32."""
    plain = 1.0 / _powers(rope.theta, head_dim)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / plain
        low = rope.original_max_position_embeddings / rope.low_freq_factor
        high = rope.original_max_position_embeddings / rope.high_freq_factor
        smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * plain / rope.factor + smooth * plain
        return torch.where(wavelength > low, plain / rope.factor, torch.where(wavelength < high, plain, blended))
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, head_dim, plain)
    return plain


def _yarn_frequencies(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Frequencies [max_position, D/2] of an NTK-aware base that is stretched by each position's own length."""
    original = rope.original_max_position_embeddings
    length = (positions + 1).clamp(min=original)
    stretch = (rope.factor * length / original - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (rope.theta * stretch)[:, None] ** exponents
