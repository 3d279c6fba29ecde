"""spec_accept: one program for each request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32  # drafts compared at a time; K is mostly smaller
NUM_WARPS = 1


@triton.jit
def spec_accept_kernel(
    sampled,  # [B, K+1] int64
    draft_tokens,  # [B, K] int64
    draft_lens,  # [B] int32
    forced_accept,  # [B] int32
    emits,  # [B] bool
    K,
    tokens,  # [B, K+1] int64
    num_tokens,  # [B] int64
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    offered = tl.load(draft_lens + b)
    forced = tl.load(forced_accept + b)
    agreed = K
    for start in range(0, K, BLOCK):
        j = start + tl.arange(0, BLOCK)
        drawn = tl.load(sampled + b * (K + 1) + j, mask=j < K, other=0)
        draft = tl.load(draft_tokens + b * K + j, mask=j < K, other=0)
        miss = (j < K) & ((drawn != draft) | (j >= offered))
        agreed = tl.minimum(agreed, tl.min(tl.where(miss, j, K), axis=0))
    accepted = tl.where(forced >= 0, tl.minimum(forced, offered), agreed)
    num = tl.where(tl.load(emits + b) != 0, accepted + 1, 0)
    tl.store(num_tokens + b, num.to(tl.int64))
    for start in range(0, K + 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        drawn = tl.load(sampled + b * (K + 1) + j, mask=j <= K, other=0)
        tl.store(tokens + b * (K + 1) + j, tl.where(j < num, drawn, -1), mask=j <= K)


def spec_accept(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    forced_accept: torch.Tensor,
    emits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of trtspec/ops/accept.py: (tokens [B, K+1] int64, num_tokens [B] int64)."""
    B, K = draft_tokens.shape
    inputs = [tensor.contiguous() for tensor in (sampled, draft_tokens, draft_lens, forced_accept, emits)]
    tokens, num_tokens = torch.empty_like(inputs[0]), sampled.new_empty(B)
    spec_accept_kernel[(B,)](*inputs, K, tokens, num_tokens, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False)
    return tokens, num_tokens
