"""Random heads, for the tests of rotate_heads."""

from __future__ import annotations

import torch
from torch import Tensor


def random_heads(
    counts: tuple[int, int], size: int, rows: int, dtype: torch.dtype, apart: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, cos, sin. counts: of query and key heads.

    Queries and keys are slices of one tensor or, as after norms, tensors of their own (`apart`).
    """
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, counts[0] + 2 * counts[1], size, generator=g).to(dtype)
    q, k = qkv[:, : counts[0]], qkv[:, counts[0] : sum(counts)]
    if apart:
        q, k = q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1)
    cos, sin = torch.randn(2, rows, 1, size, generator=g).to(dtype)
    return q, k, cos, sin
