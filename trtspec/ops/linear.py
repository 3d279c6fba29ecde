"""packed_linear: a linear layer for few rows whose result for a row does not depend on the other rows."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from trtspec.ops.dispatch import define

ROW_MULTIPLE = 4
"""Stock CPU GEMMs round 1-3 leftover rows differently; in whole fours a row's bits are its own."""


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    padding = -rows % ROW_MULTIPLE
    if padding:
        return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[:rows]
    return F.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_op = define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _reference, _fake)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], all of one dtype. Row t depends on x[t] alone, bit for bit."""
    return cast(Tensor, _op(x, weight, bias))
