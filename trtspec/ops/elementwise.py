"""silu_mul and rotate_heads: small operations that take one launch each where a GPU runs a model op by op.

Steps call them as ops, or as torch operations, as with rms_norm (ops/norm.py).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define


def silu(x: Tensor) -> Tensor:
    """Compute silu in fp32.

    It is spelt out since torch's silu rounds differently in vector bodies and tails: a row's bits would depend on the
    number of rows.
    """
    x32 = x.float()
    return (x32 / (1.0 + torch.exp(-x32))).to(x.dtype)


def silu_mul_inline(x: Tensor) -> Tensor:
    """Compute `silu_mul` as torch operations."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


_silu_mul = define(
    "silu_mul(Tensor x) -> Tensor", silu_mul_inline, lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [T, 2 * I], the gates and then the ups of a row: [T, I], in x's dtype.

    silu is computed in fp32, and rounded to x's dtype before it is multiplied. A row's bits depend on the row alone.
    """
    return cast(Tensor, _silu_mul(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by cos, sin [T, 1, D], with the halves paired (x[i], x[i + D/2])."""
    (first, second), (cos1, cos2), (sin1, sin2) = (each.chunk(2, dim=-1) for each in (x, cos, sin))
    return torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), dim=-1)


def rotate_heads_inline(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `rotate_heads` as torch operations."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_rotate_heads = define(
    "rotate_heads(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)", rotate_heads_inline, _fake
)


def rotate_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by cos, sin [T, 1, D], as `rotate` does. All have one dtype.

    Products, sums and differences are rounded to that dtype, one by one.
    """
    return cast("tuple[Tensor, Tensor]", _rotate_heads(q, k, cos, sin))
