"""Weights that are float8_e4m3fn already in the checkpoint: values and scales go to our layout as they are.

Tensors of a linear [N, K]: weight [N, K] float8_e4m3fn; weight_scale [], [1], [N] or [N, 1], of any floating-point
dtype. If its inputs are rounded too, there is also input_scale [] or [1]. The weight stands for weight * weight_scale,
and the linear computes

    (round_e4m3(x / input_scale) @ weight^T) * (input_scale * weight_scale)

with sums in fp32. Linears that are one matrix here (q, k, v; gate, up) keep their own weight scales, one for each row.
The largest of their input scales applies to all of them, as in vLLM and TensorRT-LLM: writers calibrate them on the
same x.

Inputs that were meant to be rounded with scales made at run time ("dynamic") stay in the model's dtype. Kernels for fp8
weights alone (vLLM's Marlin) do the same. The results are nearer to the unquantised model, but not bit for bit those of
rounded inputs.

Sources: vLLM's ModelOptFp8LinearMethod and CompressedTensorsW8A8Fp8, TensorRT-LLM's FP8QDQLinearMethod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from trtspec.config.checkpoint.weight_schemes import Fp8Scheme
from trtspec.models.layers import Linear
from trtspec.models.quantized_part import Format, Part, Shapes, padded_columns
from trtspec.ops.packing import pack_fp8

Fp8Part: TypeAlias = Part[Fp8Scheme]


class Fp8(Format[Fp8Scheme]):
    """The format of float8_e4m3fn weights that the module's docstring describes."""

    def problem(self, part: Fp8Part) -> str | None:
        """None, as this format can hold a linear of any shape."""
        return None

    def shapes(self, part: Fp8Part) -> tuple[Shapes, Shapes]:
        """Shapes of weight and weight_scale, and of input_scale if the scheme is static. No tensor is optional."""
        N = part.slot.shape[0]
        shapes: Shapes = {"weight": part.slot.shape, "weight_scale": ((1,), (N,), (N, 1))[part.scheme.scale_dims]}
        if part.scheme.static:
            shapes["input_scale"] = (1,)
        return shapes, {}

    def misfit(self, part: Fp8Part, kind: str, tensor: Tensor) -> str | None:
        """The dtype that a tensor lacks, "float8_e4m3fn" or "floating-point numbers"; None = it has that dtype."""
        if kind == "weight":
            return None if tensor.dtype == torch.float8_e4m3fn else "float8_e4m3fn"
        return None if tensor.is_floating_point() else "floating-point numbers"

    def hold(self, linear: Linear, parts: Sequence[Fp8Part], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Pack the parts' tensors. CheckpointError for NaN weights, and for scales that are not positive and finite."""
        scales, x_scales = [], []
        for part, given in zip(parts, tensors, strict=True):
            scale = given["weight_scale"].float().flatten()
            if not (scale.isfinite() & (scale > 0)).all():
                raise part.damaged("has a weight_scale that is not positive and finite")
            if ((given["weight"].view(torch.uint8) & 0x7F) == 0x7F).any():
                raise part.damaged("has weights that are NaN")
            scales.append(scale.expand(part.slot.shape[0]))
            if part.scheme.static:
                x_scales.append(given["input_scale"].float().reshape(1))
                if not 0 < float(x_scales[-1]) < float("inf"):
                    raise part.damaged(f"has input_scale {float(x_scales[-1]):g}, which is no step to round to")
        octets = torch.cat([given["weight"].view(torch.uint8) for given in tensors])
        x_scale = torch.cat(x_scales).amax(0, keepdim=True) if x_scales else None
        linear.hold(*pack_fp8(octets.view(torch.float8_e4m3fn), torch.cat(scales)), x_scale=x_scale)

    def describe(self, linear: Linear, parts: Sequence[Fp8Part]) -> None:
        """Give the linear panels and scales of its shape on torch's meta device."""
        N, K = sum(part.slot.shape[0] for part in parts), parts[0].slot.shape[1]
        values = torch.empty(N, K, dtype=torch.float8_e4m3fn, device="meta")
        x_scale = torch.empty(1, device="meta") if parts[0].scheme.static else None
        linear.hold(*pack_fp8(values, torch.empty(N, device="meta")), x_scale=x_scale)

    def num_bytes(self, parts: Sequence[Fp8Part]) -> int:
        """Bytes of the padded panels and of their scales, and of the input scale if the scheme is static."""
        return padded_columns(parts) * (-(-parts[0].slot.shape[1] // 4) * 4 + 4) + 4 * parts[0].scheme.static
