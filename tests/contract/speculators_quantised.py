"""Heads of the speculators package as llm-compressor writes them: with integers, by the package compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn

GROUP = 32


@torch.no_grad()
def save_quantised(head: Any, out: Path, bits: int, ignore: list[str]) -> None:
    """Save the head with integers, rounded to nearest and symmetric.

    4 bits are in groups of 32 inputs, 8 bits per output channel. ignore: names of linears that stay as they are.
    Afterwards the head computes with the written weights. Each linear then reads what trtspec's linears read: rows
    rounded to int8.
    """
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel" if bits == 8 else "group"}
    weights["group_size"] = None if bits == 8 else GROUP
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    apply_quantization_config(head, QuantizationConfig(config_groups=groups, ignore=ignore, format="pack-quantized"))
    for module in head.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        grouped = module.weight.unflatten(1, (-1, module.weight.shape[1] if bits == 8 else GROUP))
        scale, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), module.quantization_scheme.weights)
        module.weight_scale.copy_(scale.bfloat16())  # as in a bf16 head; trtspec holds it exactly
        module.quantization_status = QuantizationStatus.FROZEN
        module.register_forward_pre_hook(lambda linear, inputs: rounded(linear, inputs[0], bits))
    compressor = ModelCompressor.from_pretrained_model(head, "pack-quantized")
    compressor.compress_model(head)
    head.save_pretrained(out)
    compressor.update_config(str(out))
    compressor.decompress_model(head)


def rounded(linear: nn.Module, x: Tensor, bits: int) -> Tensor:
    """Round x [..., K]: each row (8 bits) or group of it becomes multiples of a 127th of its largest number."""
    grouped = x.unflatten(-1, (-1, x.shape[-1] if bits == 8 else GROUP))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
    return ((grouped / scale).round() * scale).flatten(-2)
