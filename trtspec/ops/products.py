"""Products of matrices in which a row's bits depend on that row alone.

The references of linears and attention use them. How a GEMM adds up a row depends on the number of rows: MKL chooses by
it on Intel's CPUs, and so does oneDNN in half precision. oneDNN's inner product in fp32 has one order for two rows and
more, whatever the CPU and the number of threads. Tests verify this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4
"""Multiple to which rows are padded. Without oneDNN, stock CPU GEMMs round 1-3 leftover rows differently."""

DEPTH_MULTIPLE = 16
"""Multiple to which the depth is padded: whole cache lines of 4-byte numbers, which align all rows.

fp32 GEMMs sum a row in an order that depends on its alignment.
"""

_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, y: Tensor) -> Tensor:
    """x [M, K], y [N, K] fp32 -> x @ y^T [M, N] fp32."""
    rows = x.shape[0]
    if missing := -x.shape[1] % DEPTH_MULTIPLE:  # no common model is this narrow
        x, y = F.pad(x, (0, missing)), F.pad(y, (0, missing))
    return _whole(F.pad(x, (0, 0, 0, -rows % ROW_MULTIPLE)), y)[:rows]


def products(x: Tensor, y: Tensor) -> Tensor:
    """x [..., M, K], y [..., N, K] fp32 -> x @ y^T [..., M, N] fp32, each product as if it were the only one.

    M is a multiple of ROW_MULTIPLE, K of DEPTH_MULTIPLE. Dimensions before the last two are broadcast.
    """
    if not (_ONEDNN and x.device.type == "cpu" and x.numel() and y.numel()):
        return torch.matmul(x, y.mT)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    xs, ys = (one.expand(*batch, *one.shape[-2:]).flatten(0, -3) for one in (x, y))
    outs = [_whole(one, other) for one, other in zip(xs, ys, strict=True)]
    return torch.stack(outs).view(*batch, x.shape[-2], y.shape[-2])


def _whole(x: Tensor, y: Tensor) -> Tensor:
    if _ONEDNN and x.device.type == "cpu" and x.shape[0]:
        x, y = x.contiguous(), y.contiguous()  # a view's rows may be unaligned
        return torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x.contiguous(), y)
