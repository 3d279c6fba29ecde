"""spec_accept: the number of drafts that the target agrees with, and the tokens to emit."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define


def _reference(
    sampled: Tensor, draft_tokens: Tensor, draft_lens: Tensor, forced_accept: Tensor, emits: Tensor
) -> tuple[Tensor, Tensor]:
    K = draft_tokens.shape[1]
    offered = torch.arange(K, device=sampled.device) < draft_lens[:, None]  # [B, K]
    miss = (draft_tokens != sampled[:, :K]) | ~offered
    agreed = (miss.cumsum(1) == 0).sum(1)  # length of the leading run of agreement
    forced = torch.minimum(forced_accept.long(), draft_lens.long())
    accepted = torch.where(forced_accept >= 0, forced, agreed)
    num_tokens = torch.where(emits, accepted + 1, 0)
    kept = torch.arange(K + 1, device=sampled.device) < num_tokens[:, None]
    return torch.where(kept, sampled, -1), num_tokens


def _fake(sampled: Tensor, draft_tokens: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return sampled.new_empty(sampled.shape), sampled.new_empty(sampled.shape[0])


_op = define(
    "spec_accept(Tensor sampled, Tensor draft_tokens, Tensor draft_lens, Tensor forced_accept, Tensor emits)"
    " -> (Tensor, Tensor)",
    _reference,
    _fake,
)


def spec_accept(
    sampled: Tensor, draft_tokens: Tensor, draft_lens: Tensor, forced_accept: Tensor, emits: Tensor
) -> tuple[Tensor, Tensor]:
    """Strict acceptance along a chain: (tokens [B, K+1] int64, -1 past the end; num_tokens [B] int64).

    num_tokens is 1 + the length of the leading run of draft == sampled. The emitted tokens are the target's own draws,
    so the text is that of plain decoding.
    sampled [B, K+1] int64: the target's own draw at each row.
    draft_tokens [B, K] int64: drafts, of which draft_lens [B] int32 are real.
    forced_accept [B] int32: -1 = off; else min(n, draft_len) drafts count as agreed whatever they are. This is lossy:
    it is for benchmarks and debugging.
    emits [B] bool: False gives 0 tokens. That is so for a chunk that is not the last.
    """
    return cast("tuple[Tensor, Tensor]", _op(sampled, draft_tokens, draft_lens, forced_accept, emits))
