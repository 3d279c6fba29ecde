"""rms_norm: the only sum of floats in a model that is neither a linear nor attention.

Steps that run op by op call it as an op. So do graphs that call kernels directly (backends/aoti). Other compilers get
torch operations, which they fuse. On a GPU, torch would split a row's sum by the number of rows, so there must be a
kernel.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define


def rms_norm_inline(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` as torch operations."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_op = define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_inline, _fake)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x [..., H], weight [H] -> [..., H], all of one dtype.

    It is computed in fp32, and rounded to x's dtype before and after the multiplication by the weight. A row's bits
    depend on the row alone.
    """
    return cast(Tensor, _op(x, weight, eps))
