"""Parts of packed_linear for quantised weights: x rounded as the reference rounds it, and products with groups.

Weights in groups are int4 or int8. The operations are the reference's in its order, each rounded once (enable_fp_fusion
is off). So integers, scales and the results of groups are those of the reference, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from trtspec_plugins.triton.launch import GROUP_BLOCK, GROUP_ROWS

TINY = tl.constexpr(1e-30)  # as in trtspec/ops/linear.py
LARGEST = tl.constexpr(3.4028234663852886e38)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bit below the units; ties go to even
E4M3_UNIT = tl.constexpr(256.0)  # factor by which results of e4m3_to_fp16 are still to be multiplied
BLOCK = 1024  # inputs of a row that are loaded at a time
GROUP_STAGES = 3
GROUP_CHUNK = 256  # inputs whose scales are read at a time


@triton.jit
def e4m3_to_fp16(octets):
    """e4m3 numbers as bytes -> 2^-8 of them as fp16: their bits move to the places of fp16's. (NaN is lost.)"""
    bits = octets.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _magnitude_bits(x):
    """|x| as integers in the same order; infinity, and NaN after it, are above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(x, largest):
    """x as integers -127..127 in units of largest / 127; zeros if `largest` is tiny or not finite."""
    fits = (largest >= TINY) & (largest <= LARGEST)
    inverse = tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), largest)
    return tl.where(fits, (x * inverse + TO_INTEGER) - TO_INTEGER, 0.0)


@triton.jit
def quantize_row_kernel(
    x,  # [T, K], rows x_stride apart
    K,
    x_stride,
    values_stride,
    values,  # [T, K] int8, rows values_stride apart
    x_scales,  # [T] fp32
    BLOCK: tl.constexpr,
):
    """Quantise a row, with one scale: one program for each row."""
    t = tl.program_id(0).to(tl.int64)
    bits = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, _magnitude_bits(tl.load(x + t * x_stride + k, mask=k < K, other=0.0).to(tl.float32)))
    largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(x_scales + t, tl.div_rn(largest, 127.0))
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        row = tl.load(x + t * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(values + t * values_stride + k, _round(row, largest).to(tl.int8), mask=k < K)


@triton.jit
def quantize_groups_kernel(
    x,  # [T, groups * GROUP], rows x_stride apart
    groups,
    x_stride,
    values,  # [T, groups * GROUP] int8
    x_scales,  # [T, groups] fp32
    x_sums,  # [T, groups] int32: sum of the values of a group
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise BLOCK numbers of a row, with one scale for each group: one program for each such block."""
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (g < groups)[:, None]
    row = tl.load(x + t * x_stride + k, mask=there, other=0.0).to(tl.float32)  # [groups of BLOCK, GROUP]
    largest = tl.max(_magnitude_bits(row), axis=1).to(tl.float32, bitcast=True)
    rounded = _round(row, largest[:, None])
    tl.store(values + t * groups * GROUP + k, rounded.to(tl.int8), mask=there)
    tl.store(x_scales + t * groups + g, tl.div_rn(largest, 127.0), mask=g < groups)
    tl.store(x_sums + t * groups + g, tl.sum(rounded.to(tl.int32), axis=1), mask=g < groups)


@triton.jit
def round_rows_kernel(
    x,  # [T, K], rows x_stride apart
    scale,  # [1] fp32
    K,
    x_stride,
    out,  # [T, K]
    BLOCK: tl.constexpr,
):
    """Compute the reference's round_e4m3. Every dtype of x holds its results exactly."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + t * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    value = tl.div_rn(row, tl.load(scale))
    value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))  # NaN stays
    # Numbers in [2^e, 2^(e+1)) are multiples of 2^(e-3), and numbers below 2^-6 are multiples of 2^-9. Adding
    # 1.5 * 2^23 of these units and subtracting them again leaves the nearest multiple, ties to even.
    exponent = tl.maximum((_magnitude_bits(value) >> 23) - 127, -6)
    big = (((exponent - 3 + 23 + 127) << 23) | 0x400000).to(tl.float32, bitcast=True)
    tl.store(out + t * K + k, ((value + big) - big).to(out.dtype.element_ty), mask=k < K)


@triton.jit
def _group_numbers(
    start, row, panel, groups, scales, zeros, x_scales, x_sums, T, ZEROS: tl.constexpr, CHUNK: tl.constexpr
):
    """Scale and zero [CHUNK, 32] of CHUNK groups of a panel, and x's scales and sums [BLOCK_M, CHUNK] of these groups.

    Groups that do not exist have zeros.
    """
    g = start + tl.arange(0, CHUNK)
    column = (panel.to(tl.int64) * groups + g)[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = (g < groups)[:, None]
    scale = tl.load(scales + column, mask=there, other=0.0).to(tl.float32)
    zero = tl.full((CHUNK, 32), 8, tl.int32)
    if ZEROS:
        zero = tl.load(zeros + column, mask=there, other=0).to(tl.int32)
    place = row.to(tl.int64)[:, None] * groups + g[None, :]
    real = (row < T)[:, None] & (g < groups)[None, :]
    x_scale = tl.load(x_scales + place, mask=real, other=0.0)
    return scale, zero, x_scale, tl.load(x_sums + place, mask=real, other=0)


@triton.jit
def groups_kernel(
    x,  # [T, K] int8
    weight,  # [P, K/8, 32, 4] uint8, or [P, K/4, 32, 4] int8
    scales,  # [P, K/GROUP, 32] fp16
    zeros,  # int4: [P, K/GROUP, 32] uint8, or anything where not ZEROS
    x_scales,  # [T, K/GROUP] fp32
    x_sums,  # [T, K/GROUP] int32
    bias,  # [N], or anything where not BIAS
    T,
    N,
    K,
    out,  # [T, N]
    PER_WORD: tl.constexpr,  # inputs of a word: 8 of int4, 4 of int8
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,  # groups whose scales are read at once, a step ahead
):
    """Multiply a tile of rows with a panel, in one program.

    Groups are added in fp32, each rounded, and for that reason by one program.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    panel = tl.program_id(1)
    groups = K // GROUP
    octet = tl.arange(0, 128)
    x_row = x + tl.minimum(row, T - 1).to(tl.int64)[:, None] * K
    words = weight + panel.to(tl.int64) * (K // PER_WORD * 128)
    of_group = tl.arange(0, CHUNK)
    result = tl.zeros((BLOCK_M, 32), tl.float32)
    scale, zero, x_scale, x_sum = _group_numbers(
        0, row, panel, groups, scales, zeros, x_scales, x_sums, T, ZEROS, CHUNK
    )
    for first in range(0, groups, CHUNK):
        next_scale, next_zero, next_x_scale, next_x_sum = _group_numbers(
            first + CHUNK, row, panel, groups, scales, zeros, x_scales, x_sums, T, ZEROS, CHUNK
        )
        for i in tl.static_range(CHUNK):
            k = (first + i) * GROUP + tl.arange(0, GROUP)
            step = (first + i) * (GROUP // PER_WORD) + tl.arange(0, GROUP // PER_WORD)
            rows = tl.load(x_row + k[None, :], mask=(k < K)[None, :], other=0)
            in_step = (step * PER_WORD < K)[:, None]
            octets = tl.load(words + (step[:, None] * 128 + octet[None, :]), mask=in_step, other=0)
            if PER_WORD == 8:  # byte j of a word has input j low and input 4 + j high
                inputs = tl.reshape(tl.join(octets & 15, octets >> 4), (GROUP // 8, 32, 4, 2))
                columns = tl.reshape(tl.permute(inputs, (0, 3, 2, 1)), (GROUP, 32)).to(tl.int8)
            else:
                columns = tl.reshape(tl.permute(tl.reshape(octets, (GROUP // 4, 32, 4)), (0, 2, 1)), (GROUP, 32))
            dot = tl.dot(rows, columns, out_dtype=tl.int32)
            # A number of the chunk is picked as the sum of it and zeros.
            mine = of_group == i
            its_scale = tl.sum(tl.where(mine[:, None], scale, 0.0), axis=0)  # [32]
            its_x_scale = tl.sum(tl.where(mine[None, :], x_scale, 0.0), axis=1)  # [BLOCK_M]
            if PER_WORD == 8:
                its_zero = tl.sum(tl.where(mine[:, None], zero, 0), axis=0) if ZEROS else tl.full((32,), 8, tl.int32)
                its_x_sum = tl.sum(tl.where(mine[None, :], x_sum, 0), axis=1)
                dot -= its_x_sum[:, None] * its_zero[None, :]
            result += dot.to(tl.float32) * (its_x_scale[:, None] * its_scale[None, :])
        scale, zero, x_scale, x_sum = next_scale, next_zero, next_x_scale, next_x_sum
    n = panel * 32 + tl.arange(0, 32)
    if BIAS:
        result = result + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(row < T)[:, None] & (n < N)[None, :])


@triton.jit
def groups_plugin_kernel(
    x, values, x_scales, x_sums, panels, scales, zeros, bias, T, N, K, out,
    PER_WORD: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`groups_kernel` with the arguments of TensorRT's plugin, which has x for its dtype alone."""
    groups_kernel(
        values, panels, scales, zeros, x_scales, x_sums, bias, T, N, K, out,
        PER_WORD, ZEROS, True, BLOCK_M, GROUP, CHUNK,
    )  # fmt: skip


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (integers [T, K] int8, whose rows start at multiples of 16 bytes, scales [T] fp32)."""
    T, K = x.shape
    values = x.new_empty(T, K + -K % 16, dtype=torch.int8)[:, :K]
    x_scales = x.new_empty(T, dtype=torch.float32)
    quantize_row_kernel[(T,)](
        x, K, x.stride(0), values.stride(0), values, x_scales, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return values, x_scales


def round_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Round x [T, K] / scale [1] to e4m3 numbers, in x's dtype."""
    T, K = x.shape
    out = x.new_empty(T, K)
    round_rows_kernel[(T, triton.cdiv(K, BLOCK))](
        x, scale, K, x.stride(0), out, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


def groups_linear(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply x [T, K] with panels of int4 or int8 in groups, into out [T, N]."""
    (T, K), (panels, groups) = x.shape, scales.shape[:2]
    group = K // groups
    values = x.new_empty(T, K, dtype=torch.int8)
    x_scales = x.new_empty(T, groups, dtype=torch.float32)
    x_sums = x.new_empty(T, groups, dtype=torch.int32)
    quantize_groups_kernel[(T, triton.cdiv(groups, GROUP_BLOCK // group))](
        x, groups, x.stride(0), values, x_scales, x_sums,
        GROUP=group, BLOCK=GROUP_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    groups_kernel[(triton.cdiv(T, GROUP_ROWS), panels)](
        values, weight, scales, zeros, x_scales, x_sums, x if bias is None else bias, T, out.shape[1], K, out,
        PER_WORD=8 if weight.dtype == torch.uint8 else 4, ZEROS=zeros.numel() > 0, BIAS=bias is not None,
        BLOCK_M=GROUP_ROWS, GROUP=group, CHUNK=GROUP_CHUNK // group,
        num_warps=4, num_stages=GROUP_STAGES, enable_fp_fusion=False,
    )  # fmt: skip
