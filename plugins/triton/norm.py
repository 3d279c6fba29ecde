"""rms_norm: one program for each row. The order of the row's sum follows from H alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,  # [rows, H], rows x_stride apart
    weight,  # [H]
    eps,
    H,
    x_stride,
    out,  # [rows, H]
    BLOCK: tl.constexpr,  # at least H
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    values = tl.load(x + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, axis=0) / H
    values = values * (1.0 / tl.sqrt_rn(mean + eps))
    weights = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * H + h, (weights * rounded).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op of trtspec/ops/norm.py: x [..., H] -> [..., H], in x's dtype."""
    H = x.shape[-1]
    rows = x.reshape(-1, H)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(H)
        rms_norm_kernel[(rows.shape[0],)](
            rows, weight, eps, H, rows.stride(0), out,
            BLOCK=block, num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
    return out
