"""packed_embedding: one program for BLOCK numbers of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from trtspec_plugins.triton.linear_quantized import E4M3_UNIT, e4m3_to_fp16

from trtspec.ops.packing import FLOATS, PANEL

FLOAT, INT8, INT4, FP8, INT8_GROUPS = (tl.constexpr(i) for i in range(5))
BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def packed_embedding_kernel(
    ids,  # [n] int64
    weight,  # [rows, K], or panels of int8, uint8 (int4, and fp8 as bytes) or floats
    scales,  # int8, fp8: [P, 32] fp32; int4, int8 in groups: [P, groups, 32] fp16; else anything
    zeros,  # int4: [P, groups, 32] uint8, or anything where not ZEROS
    rows,  # of the matrix, including those that pad the last panel
    K,
    steps,  # words of a column
    groups,
    out,  # [n, K]
    LAYOUT: tl.constexpr,
    PER_WORD: tl.constexpr,  # values of a word, or 0 where the matrix is [rows, K]
    ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = k < K
    token = tl.minimum(tl.maximum(tl.load(ids + i), 0), rows - 1)  # a GPU cannot raise, but must not read past the end
    panel = token // 32
    column = token % 32
    if PER_WORD == 0:
        values = tl.load(weight + token * K + k, mask=there, other=0)
    elif LAYOUT == INT4:
        # Byte j of a word has input j in its low four bits and input 4 + j in its high four bits.
        octets = tl.load(weight + ((panel * steps + k // 8) * 32 + column) * 4 + k % 4, mask=there, other=0)
        values = (octets.to(tl.int32) >> (k // 4 % 2 * 4)) & 15
    else:
        word = (panel * steps + k // PER_WORD) * 32 + column
        values = tl.load(weight + word * PER_WORD + k % PER_WORD, mask=there, other=0)
    if LAYOUT == INT8:
        values = values.to(tl.float32) * tl.load(scales + token)
    if LAYOUT == FP8:
        values = e4m3_to_fp16(values).to(tl.float32) * E4M3_UNIT * tl.load(scales + token)
    if LAYOUT == INT8_GROUPS:
        group = (panel * groups + k // (K // groups)) * 32 + column
        values = values.to(tl.float32) * tl.load(scales + group, mask=there, other=0).to(tl.float32)
    if LAYOUT == INT4:
        group = (panel * groups + k // (K // groups)) * 32 + column
        zero = 8.0
        if ZEROS:
            zero = tl.load(zeros + group, mask=there, other=0).to(tl.float32)
        values = (values.to(tl.float32) - zero) * tl.load(scales + group, mask=there, other=0).to(tl.float32)
    tl.store(out + i * K + k, values, mask=there)


def packed_embedding(ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, in_features: int) -> Tensor:
    """The op of trtspec/ops/embedding.py: [n, in_features]. Ids past the matrix give its first or last row."""
    layout = {torch.int8: INT8, torch.uint8: INT4, torch.float8_e4m3fn: FP8}.get(weight.dtype, FLOAT).value
    if layout == INT8.value and scales.ndim == 3:
        layout = INT8_GROUPS.value
    out = weight.new_empty(ids.shape[0], in_features, dtype=weight.dtype if weight.dtype in FLOATS else torch.float32)
    if out.numel() == 0:
        return out
    plain = weight.ndim == 2
    per_word = 0 if plain else weight.shape[3] if weight.ndim == 4 else 1
    groups = scales.shape[1] if scales.ndim == 3 else 1
    packed_embedding_kernel[(ids.shape[0], triton.cdiv(in_features, BLOCK))](
        ids, weight.view(torch.uint8) if layout == FP8.value else weight, scales, zeros,
        weight.shape[0] * (1 if plain else PANEL), in_features, weight.shape[1], groups, out,
        LAYOUT=layout, PER_WORD=per_word, ZEROS=zeros.numel() > 0, BLOCK=BLOCK,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
