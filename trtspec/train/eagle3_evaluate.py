"""How far an EAGLE3 head guesses its target's text, without an engine: what greedy chains would keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.eagle3 import Eagle3Head
from trtspec.train.data import Tokens
from trtspec.train.eagle3 import UnrolledAttend, observe
from trtspec.train.evaluate import Acceptance


class Chains(nn.Module):
    """Guesses of the chains that start at every row of a known text.

    While a chain is right its tokens are the text's; once it is wrong the rest is rejected. So all chains can be
    unrolled at once over the text itself, as in training.
    """

    def __init__(self, head: Eagle3Head, num_passes: int) -> None:
        super().__init__()
        self.head, self.num_passes = head, num_passes

    def forward(self, text: Tensor, captured: Tensor) -> Tensor:
        """text [B, S + 1], captured [B * S, n * Ht] -> [B, S, K] bool: draft j of the chain at row p is the text's
        token at p + 2 + j (False past the end)."""
        batch, seq = text.shape[0], text.shape[1] - 1
        attend = UnrolledAttend(batch)
        positions = torch.arange(seq).repeat(batch)
        h = self.head.fuse(captured)
        right = torch.zeros(batch, seq, self.num_passes, dtype=torch.bool)
        for j in range(self.num_passes):
            token = text[:, 1:].roll(-j, dims=1).reshape(-1)  # at p + 1 + j
            h = self.head(token, h, positions + j, attend)
            guess = self.head.target_ids[self.head.logits(h).argmax(-1)].view(batch, seq)
            known = seq - 1 - j  # rows whose token at p + 2 + j is in the text
            right[:, :known, j] = guess[:, :known] == text[:, 2 + j :]
        return right


@torch.no_grad()
def chain_acceptance(
    head: Eagle3Head,
    target: Decoder,
    capture_layers: Sequence[int],
    text: Tokens,
    prompt_len: int,
    num_draft_tokens: int,
    batch_size: int = 8,
) -> Acceptance:
    """Acceptance of greedy chains of K drafts along `text` [B, L], the target's greedy continuations of prompts.

    The target computes in its own dtype, and so does the head, whatever its weights are kept in.
    """
    dtype = target.embedding.weight.dtype
    target.train()  # torch's own linears
    chains = Chains(head, num_draft_tokens)
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
