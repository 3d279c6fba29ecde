"""How far a draft head guesses its target's text, without an engine: what greedy chains would keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trtspec.errors import ConfigError
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.evaluate import Acceptance
from trtspec.train.lessons import observe
from trtspec.train.unrolled import unroll


class Chains(nn.Module):
    """Guesses of the chains that start at every row of a known text.

    While a chain is right its tokens are the text's; once it is wrong the rest is rejected. So all chains can be
    unrolled at once over the text itself, as in training.
    """

    def __init__(self, head: DraftHead, num_passes: int, moving: bool) -> None:
        super().__init__()
        self.head, self.num_passes, self.moving = head, num_passes, moving

    def forward(self, text: Tensor, captured: Tensor) -> Tensor:
        """text [B, S + 1], captured [B * S, n * Ht] -> [B, S, K] bool: draft j of the chain at row p is the text's
        token at p + 2 + j (False past the end)."""
        batch, seq = text.shape[0], text.shape[1] - 1
        right = torch.zeros(batch, seq, self.num_passes, dtype=torch.bool)
        for j, (_, logits) in enumerate(unroll(self.head, text[:, 1:], captured, self.num_passes, self.moving)):
            guess = self.head.target_ids[logits.argmax(-1)]  # [B, S]
            known = seq - 1 - j  # rows whose token at p + 2 + j is in the text
            right[:, :known, j] = guess[:, :known] == text[:, 2 + j :]
        return right


@torch.no_grad()
def chain_acceptance(
    head: DraftHead,
    target: Decoder,
    capture_layers: Sequence[int],
    text: Tokens,
    prompt_len: int,
    num_draft_tokens: int,
    batch_size: int = 8,
    moving: bool = True,
) -> Acceptance:
    """Acceptance of greedy chains of K drafts along `text` [B, L], the target's greedy continuations of prompts.

    The target computes in its own dtype, and so does the head, whatever its weights are kept in. moving: see
    unrolled.unroll.
    """
    dtype = target.embedding.weight.dtype
    target.train()  # torch's own linears
    chains = Chains(head, num_draft_tokens, moving)
    weights = {name: parameter.to(dtype) for name, parameter in chains.named_parameters()}
    accepted: list[int] = []
    for start in range(0, len(text), batch_size):
        ids = torch.from_numpy(text[start : start + batch_size].astype(np.int64))
        captured, _ = observe(target, capture_layers, ids[:, :-1])
        right = torch.func.functional_call(chains, weights, (ids, captured.flatten(0, 1)))
        kept = right.long().cumprod(-1).sum(-1).tolist()  # [B, S] drafts that the chain at each row keeps
        for row in kept:
            place = prompt_len - 1  # the prompt's own step gives the first token; the next step checks these drafts
            while place + num_draft_tokens + 1 < len(row):
                accepted.append(row[place])
                place += row[place] + 1
    if not accepted:
        raise ConfigError(
            f"{text.shape[1] - prompt_len} new tokens are too short to check {num_draft_tokens} drafts; use more"
        )
    counts = np.asarray(accepted)
    per_position = tuple(float((counts > j).mean()) for j in range(num_draft_tokens))
    return Acceptance(float(counts.mean()) + 1.0, per_position, len(accepted))
