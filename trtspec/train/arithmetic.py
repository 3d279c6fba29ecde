"""The dtype that training computes in on this CPU."""

from __future__ import annotations

import torch

from trtspec.ops.dispatch import load_plugins

BF16_INSTRUCTIONS = ("avx512_bf16", "amx")
"""Instruction sets that multiply bf16 faster than fp32."""


def fast_dtype() -> torch.dtype:
    """bfloat16 where torch's products of it are faster than those of fp32, by the instruction set of our kernels."""
    return torch.bfloat16 if load_plugins().get("cpu") in BF16_INSTRUCTIONS else torch.float32
