"""A draft head as it is trained: unrolled over K passes, as inference chains them, on whole windows of text.

Training-time test (Li et al., "EAGLE-3", arXiv 2503.01840, section 3.2): the head learns to read its own output in
place of the target's hidden states. At pass j row p holds the token at p + 1 + j and the output of pass j - 1; it
attends to pass 0 of the rows up to p, as the cache holds them when a chain starts, and to its own earlier passes. What
it should say is the target's distribution of the token at p + 2 + j. Heads without attention unroll alike; where every
pass is a module with a cache of its own (MTP with K modules), it attends to its own rows up to p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.train.language_model import CausalAttend, compiled, heads_first
from trtspec.train.lessons import LAST_STATE

STEP_WEIGHT = 0.8
"""Each pass counts this much of the one before it: later drafts are reached less often."""


@dataclass(frozen=True)
class Objective:
    """What one pass is taught, as weights of: cross-entropy with the target's next token, of which `hard` is against
    its arg-max and the rest against its distribution; smooth L1 between the pass's output and the target's last hidden
    state at the position that the output stands for."""

    tokens: float = 1.0
    hard: float = 0.5
    features: float = 0.0


class UnrolledAttend:
    """Attention of the unrolled passes over `batch` windows of S rows, packed; one call a pass and layer."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # layer -> K, V of its passes, [B, Hq, S, D]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kept.setdefault(layer, ([], []))
        if not keys:
            out = CausalAttend(self.batch)(layer, q, k, v)
        groups = q.shape[1] // k.shape[1]
        keys.append(heads_first(k.repeat_interleave(groups, dim=1), self.batch))
        values.append(heads_first(v.repeat_interleave(groups, dim=1), self.batch))
        if len(keys) == 1:
            return out
        return _later(heads_first(q, self.batch), keys, values).transpose(1, 2).reshape(q.shape)


def _later(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Pass 0 causally, later passes at the row itself: [B, Hq, S, D]."""
    S = q.shape[2]
    scores: Tensor = q @ keys[0].transpose(-1, -2)  # [B, Hq, S, S]
    future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
    scores = torch.cat((scores.masked_fill(future, float("-inf")), *own), dim=-1)
    weights = (scores.float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    out: Tensor = weights[..., :S] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., S + i : S + i + 1] * value
    return out


def unroll(
    head: DraftHead, following: Tensor, captured: Tensor, num_passes: int, moving: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """following [B, S] (the token after each row), captured [B * S, n * Ht] -> of each pass in turn: its output
    [B, S, H] and logits [B, S, Vd] fp32. The last j rows of pass j hold wrapped tokens and mean nothing.

    moving: a pass's rows stand one position behind those of the pass before, as in a chain of one head; False: a module
    for every pass, whose rows stand where those of pass 0 do.
    """
    batch, seq = following.shape
    attend = UnrolledAttend(batch)
    positions = torch.arange(seq, device=following.device).repeat(batch)
    h = head.fuse(captured)
    for j in range(num_passes):
        token = following.roll(-j, dims=1).reshape(-1)  # at p + 1 + j
        h = head(token, h, positions + j if moving else positions, attend, j)
        yield h.view(batch, seq, -1), head.logits(h, j).view(batch, seq, -1)


class Unrolled(nn.Module):
    """A head as it is trained: K passes over whole windows, and what they are taught."""

    def __init__(self, head: DraftHead, num_passes: int, objective: Objective, moving: bool) -> None:
        super().__init__()
        self.head, self.num_passes, self.objective, self.moving = head, num_passes, objective, moving

    def forward(
        self, following: Tensor, captured: Tensor, best: Tensor, probs: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """following [B, S], captured [B * S, n * Ht], best [B, S] (the target's arg-max as draft id, or -1), probs
        [B, S, Vd] (the target's distribution over the draft vocabulary), last [B, S, Ht] (its last hidden states)
        -> loss, agreement [K] (see HeadLoss)."""
        objective, rows = self.objective, following.shape[1] - self.num_passes
        total = torch.zeros((), device=following.device)
        right = torch.ones(following.shape[0], rows, dtype=torch.bool, device=following.device)
        agreement = []
        for j, (output, logits) in enumerate(unroll(self.head, following, captured, self.num_passes, self.moving)):
            ahead = slice(1 + j, 1 + j + rows)  # p + 1 + j of the rows p: from there the target says what is right
            log_probs = logits.log_softmax(-1)[:, :rows]
            goal = best[:, ahead]
            known = goal >= 0
            pick = log_probs.gather(-1, goal.clamp(min=0)[..., None])[..., 0]
            each = objective.hard * pick + (1.0 - objective.hard) * (probs[:, ahead] * log_probs).sum(-1)
            total = total - STEP_WEIGHT**j * objective.tokens * (each * known).sum() / known.sum().clamp(min=1)
            if objective.features:
                gap = F.smooth_l1_loss(output[:, :rows].float(), last[:, ahead].float())
                total = total + STEP_WEIGHT**j * objective.features * gap
            right = right & (log_probs.argmax(-1) == goal)
            agreement.append(right.float().mean())
        return total / sum(STEP_WEIGHT**j for j in range(self.num_passes)), torch.stack(agreement).detach()


class LessonLoss(Protocol):
    """The loss of one lesson, and what the log says of the last one."""

    def __call__(self, inputs: Tensor, following: Tensor, captured: Tensor, last: Tensor) -> Tensor:
        """See lessons.Lesson."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers by name."""
        ...


class HeadLoss:
    """The loss of one lesson. capture_layers: LAST_STATE = the head reads a lesson's last hidden states, else its
    captured ones. moving: see unroll.

    After a call `agreement` [K] says how often passes 0..j all hit the target's arg-max.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Decoder,
        num_passes: int,
        dtype: torch.dtype,
        objective: Objective = Objective(),  # noqa: B008 - it is frozen
        capture_layers: Sequence[int] = (),
        moving: bool = True,
        compile: bool = True,
    ) -> None:
        self.agreement = torch.zeros(num_passes)
        reads_last = tuple(capture_layers) == LAST_STATE
        unrolled = Unrolled(head, num_passes, objective, moving)

        def loss(following: Tensor, captured: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = target.logits(last.flatten(0, 1))  # [B * S, V]
                best = head.draft_ids[wanted.argmax(-1)].view(following.shape)
                probs = wanted[:, head.target_ids].softmax(-1).view(*following.shape, -1)
            # as in logits_in: cast weights, fp32 gradients
            weights = {name: parameter.to(dtype) for name, parameter in unrolled.named_parameters()}
            states = (last if reads_last else captured).flatten(0, 1).to(dtype)
            arguments = (following, states, best, probs, last)
            return cast("tuple[Tensor, Tensor]", torch.func.functional_call(unrolled, weights, arguments))

        self._loss = compiled(loss) if compile else loss

    def __call__(self, inputs: Tensor, following: Tensor, captured: Tensor, last: Tensor) -> Tensor:
        loss, self.agreement = self._loss(following, captured, last)
        return loss

    def metrics(self) -> dict[str, float]:
        """Simulated greedy acceptance length of chains of K along the last lesson's text."""
        return {"acceptance_length": 1.0 + float(self.agreement.sum())}
