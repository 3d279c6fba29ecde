"""silu_mul and rotate_heads: a program for a piece of a row. Each operation is rounded as the reference rounds it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # results of a program of silu_mul
PAIRS = 1024  # pairs of numbers, at most, that a program of rotate_heads rotates


@triton.jit
def silu_mul_kernel(
    x,  # [T, 2 * size], rows x_stride apart
    size,
    x_stride,
    out,  # [T, size]
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + i, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + i, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads_kernel(
    q,  # [T, Hq, D], rows q_stride apart
    k,  # [T, Hkv, D], rows k_stride apart
    cos,  # [T, D]
    sin,  # [T, D]
    Hq,
    Hkv,
    HALF,  # D / 2
    q_stride,
    k_stride,
    new_q,  # [T, Hq, D]
    new_k,  # [T, Hkv, D]
    HEADS: tl.constexpr,  # of a program
    HALF_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < Hq + Hkv) & (i < HALF)
    dtype: tl.constexpr = q.dtype.element_ty
    D = 2 * HALF
    of_q = head < Hq
    source = tl.where(of_q, q + row * q_stride + head * D, k + row * k_stride + (head - Hq) * D) + i
    target = tl.where(of_q, new_q + (row * Hq + head) * D, new_k + (row * Hkv + head - Hq) * D) + i
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = row * D + i
    cos1 = tl.load(cos + angle, mask=i < HALF, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=i < HALF, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    low = (first * cos1).to(dtype).to(tl.float32) - (second * sin1).to(dtype).to(tl.float32)
    high = (second * cos2).to(dtype).to(tl.float32) + (first * sin2).to(dtype).to(tl.float32)
    tl.store(target, low.to(dtype), mask=inside)
    tl.store(target + HALF, high.to(dtype), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """The op of trtspec/ops/elementwise.py: x [..., 2 I] -> [..., I]."""
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], size)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        silu_mul_kernel[(rows.shape[0], triton.cdiv(size, block))](
            rows, size, rows.stride(0), out, BLOCK=block, num_warps=max(1, block // 256), enable_fp_fusion=False
        )
    return out


def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of trtspec/ops/elementwise.py: q [T, Hq, D], k [T, Hkv, D], cos and sin [T, 1, D]."""
    (T, Hq, D), Hkv = q.shape, k.shape[1]
    q, k = (rows if rows.stride()[1:] == (D, 1) else rows.contiguous() for rows in (q, k))
    new_q, new_k = q.new_empty(q.shape), k.new_empty(k.shape)
    if T:
        half = triton.next_power_of_2(D // 2)
        heads = min(max(1, PAIRS // half), triton.next_power_of_2(Hq + Hkv))
        rotate_heads_kernel[(T, triton.cdiv(Hq + Hkv, heads))](
            q, k, cos.contiguous(), sin.contiguous(), Hq, Hkv, D // 2, q.stride(0), k.stride(0), new_q, new_k,
            HEADS=heads, HALF_PADDED=half, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return new_q, new_k
