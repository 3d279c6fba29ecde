"""Acceptance of a draft head, simulated without an engine: the drafts that greedy chains along a text would keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trtspec.errors import ConfigError
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.train.evaluate import Acceptance
from trtspec.train.training_batches import observe
from trtspec.train.unrolled import unroll


class Chains(nn.Module):
    """A module that marks the correct drafts of the chains that start at every row of a known text.

    While a chain is correct, its tokens are those of the text. After its first wrong draft, the rest is rejected. So
    all chains can be unrolled at once over the text itself, as in training.
    """

    def __init__(self, head: DraftHead, num_passes: int, moving: bool) -> None:
        super().__init__()
        self.head, self.num_passes, self.moving = head, num_passes, moving

    def forward(self, text: Tensor, captured: Tensor) -> Tensor:
        """Return which drafts are correct: text [B, S], captured [B * S, n * Ht] -> [B, S, K] bool.

        Draft j of the chain at row p is correct if it is the text's token at p + 2 + j. Drafts past the end of the text
        are False.
        """
        batch, seq = text.shape
        right = torch.zeros(batch, seq, self.num_passes, dtype=torch.bool)
        places = torch.arange(seq, device=text.device).expand(batch, -1)
        for j, y in enumerate(unroll(self.head, text, places, captured, self.num_passes, self.moving)):
            guess = self.head.target_ids[self.head.logits(y, j).argmax(-1)].view(batch, seq)
            known = max(seq - 2 - j, 0)  # rows whose token at p + 2 + j is in the text
            right[:, :known, j] = guess[:, :known] == text[:, 2 + j :]
        return right


class HeldOut:
    """A measurement of a head's acceptance: greedy chains of K drafts along `texts`, the target's greedy outputs.

    The target runs once, in its own dtype. ConfigError if no text is long enough for one step.

    texts: for each text its ids and the number of them that are the prompt. moving: whether each pass's rows are one
    position after those of the previous pass; unrolled.unroll explains it.
    """

    def __init__(
        self,
        target: Decoder,
        capture_layers: Sequence[int],
        texts: Sequence[tuple[Sequence[int], int]],
        num_draft_tokens: int,
        batch_size: int = 8,
        moving: bool = True,
    ) -> None:
        self.num_draft_tokens, self.moving, self.dtype = num_draft_tokens, moving, target.norm.weight.dtype
        if all(prompt_len + num_draft_tokens + 1 >= len(ids) for ids, prompt_len in texts):
            raise ConfigError(f"what the target says is too short to check {num_draft_tokens} drafts; use longer words")
        ordered = sorted(texts, key=lambda text: len(text[0]))  # for little padding
        self.batches: list[tuple[Sequence[tuple[Sequence[int], int]], Tensor, Tensor]] = []  # texts, ids, captured
        for start in range(0, len(ordered), batch_size):
            some = ordered[start : start + batch_size]
            ids = torch.zeros(len(some), len(some[-1][0]), dtype=torch.int64)
            for row, (own, _) in zip(ids, some, strict=True):
                row[: len(own)] = torch.tensor(own)
            self.batches.append((some, ids, observe(target, capture_layers, ids)[0].flatten(0, 1)))

    @torch.no_grad()
    def acceptance(self, head: DraftHead) -> Acceptance:
        """Return the acceptance of the head's chains.

        The head computes in the target's dtype, whatever dtype its weights are kept in.
        """
        chains = Chains(head, self.num_draft_tokens, self.moving)
        weights = {name: parameter.to(self.dtype) for name, parameter in chains.named_parameters()}
        accepted: list[int] = []
        for some, ids, captured in self.batches:
            right = torch.func.functional_call(chains, weights, (ids, captured))
            kept = right.long().cumprod(-1).sum(-1).tolist()  # [B, S]: number of drafts kept by the chain at each row
            for of_rows, (own, prompt_len) in zip(kept, some, strict=True):
                place = prompt_len - 1  # prefill gives the first token; the next step verifies these drafts
                while place + self.num_draft_tokens + 2 < len(own):
                    accepted.append(of_rows[place])
                    place += of_rows[place] + 1
        counts = np.asarray(accepted)
        per_position = tuple(float((counts > j).mean()) for j in range(self.num_draft_tokens))
        return Acceptance(float(counts.mean()) + 1.0, per_position, len(accepted))


class Watch:
    """A measurement of a head's acceptance length at POINTS evenly spaced times of its training."""

    POINTS = 16

    def __init__(self, held_out: HeldOut, head: DraftHead) -> None:
        self.held_out, self.head = held_out, head
        self._last: float | None = None
        self._next = 1 / self.POINTS

    def begin(self, progress: float) -> None:
        """Measure the head if the next point is reached. progress: share of the training that is over, 0 to 1."""
        if progress >= self._next:
            self._last = self.held_out.acceptance(self.head).length
            self._next = (int(progress * self.POINTS) + 1) / self.POINTS

    def metrics(self) -> dict[str, float]:
        """Return the last measurement; {} before the first."""
        return {} if self._last is None else {"held_out_acceptance_length": self._last}
