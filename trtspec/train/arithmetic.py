"""The dtype that training computes in on this CPU."""

from __future__ import annotations

import torch

from trtspec.ops.dispatch import load_plugins

BF16_INSTRUCTIONS = ("avx512_bf16", "amx")
"""Instruction sets that multiply bf16 faster than fp32."""


def fast_dtype() -> torch.dtype:
    """Return bfloat16 if torch multiplies it faster than float32 on this CPU, else float32.

    The instruction set of our kernels decides.
    """
    return torch.bfloat16 if load_plugins().get("cpu") in BF16_INSTRUCTIONS else torch.float32
