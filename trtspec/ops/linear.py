"""packed_linear: a linear layer for few rows whose result for a row does not depend on the other rows."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from trtspec.ops.dispatch import define

ROW_MULTIPLE = 4
"""Stock CPU GEMMs round 1-3 leftover rows differently; in whole fours a row's bits are its own."""

DEPTH_MULTIPLE = 16
"""fp32 GEMMs sum a row in an order that depends on its alignment; whole cache lines (of 4-byte numbers) align all."""

_SMALL_GEMM = 16**3
"""torch sends half-precision products to oneDNN only above this many multiplications (`use_mkldnn_matmul`)."""


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if missing := -x.shape[1] % DEPTH_MULTIPLE:  # no common model is this narrow
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    padded = max(rows, _SMALL_GEMM // weight.numel() + 1)
    padded += -padded % ROW_MULTIPLE
    if padded > rows:
        return F.linear(F.pad(x, (0, 0, 0, padded - rows)), weight, bias)[:rows]
    return F.linear(x.contiguous(), weight, bias)  # a view's rows may be unaligned, too


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_op = define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _reference, _fake)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], all of one dtype. Row t depends on x[t] alone, bit for bit."""
    return cast(Tensor, _op(x, weight, bias))
