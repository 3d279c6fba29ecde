"""rms_norm: the one sum of floats in a model that is neither a linear nor attention.

Steps that are compiled keep it open for the compiler to fuse, and eager ones on the CPU have rows of a fixed layout
either way. On a GPU run op by op, torch would cut a row's sum by how many rows there are: there it is an op with a
kernel.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define


def rms_norm_inline(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` as torch operations."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_op = define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_inline, _fake)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x [..., H], weight [H] -> [..., H], all of one dtype.

    Computed in fp32, rounded to x's dtype before it is weighted, and after. A row's bits depend on the row alone.
    """
    return cast(Tensor, _op(x, weight, eps))
