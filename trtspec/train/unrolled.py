"""Training of a draft head unrolled over K passes, as inference chains them, on whole windows of text.

This is training-time test (Li et al., "EAGLE-3", arXiv 2503.01840, section 3.2): the head learns to read its own output
in place of the target's hidden states. At pass j, row p holds the token at p + 1 + j and the output of pass j - 1,
or the target's state at pass 0. The row attends to pass 0 of the rows up to p, as the cache holds them when a chain
starts. It also attends to itself in this and its earlier passes. Its goal is the target's distribution of the token at
p + 2 + j.

Heads without attention unroll in the same way. Where every pass is a module with its own cache (MTP with K modules),
row p of a pass attends to the rows up to p of that pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.train.cross_entropy import SoftCrossEntropy, in_blocks, rows_of_logits
from trtspec.train.language_model import CausalAttend, heads_first
from trtspec.train.training_batches import LAST_STATE, TrainingBatch, taught_ahead, texts_of

STEP_WEIGHT = 0.8
"""Weight of each pass relative to the one before it: later drafts are reached less often."""


@dataclass(frozen=True)
class Objective:
    """A training goal of one pass, as weights of its losses.

    tokens: weight of the cross-entropy with the target's next token. `hard` of that is against the target's arg-max,
    the rest against its distribution. features: weight of the smooth L1 loss between the pass's output and the target's
    last hidden state at the position that the output stands for.
    """

    tokens: float = 1.0
    hard: float = 0.5
    features: float = 0.0


class UnrolledAttend:
    """An attention of the unrolled passes over packed windows, called once per pass and layer.

    texts [B, S]: as texts_of returns it.
    """

    def __init__(self, texts: Tensor) -> None:
        self.batch, self.first = texts.shape[0], CausalAttend(texts.shape[0], texts)
        self.unseen = ~self.first.seen()  # [B or 1, 1, S, S]
        self.kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # layer -> K, V of its passes, [B, Hq, S, D]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kept.setdefault(layer, ([], []))
        if not keys:
            out = self.first(layer, q, k, v)
        groups = q.shape[1] // k.shape[1]
        keys.append(heads_first(k.repeat_interleave(groups, dim=1), self.batch))
        values.append(heads_first(v.repeat_interleave(groups, dim=1), self.batch))
        if len(keys) == 1:
            return out
        return self._later(heads_first(q, self.batch), keys, values).transpose(1, 2).reshape(q.shape)

    def _later(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Attend to pass 0 causally, and to later passes at the row itself: [B, Hq, S, D]."""
        S = q.shape[2]
        scores: Tensor = q @ keys[0].transpose(-1, -2)  # [B, Hq, S, S]
        own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat((scores.masked_fill(self.unseen, float("-inf")), *own), dim=-1)
        weights = (scores.float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        out: Tensor = weights[..., :S] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., S + i : S + i + 1] * value
        return out


def unroll(
    head: DraftHead, inputs: Tensor, places: Tensor, captured: Tensor, num_passes: int, moving: bool = True
) -> Iterator[Tensor]:
    """Run num_passes passes of the head and yield the output [B * S, W] of each.

    inputs, places [B, S]: as in TrainingBatch. captured [B * S, n * Ht]. A row of pass j is undefined unless its tokens
    at p + 1 .. p + 1 + j belong to its text and window. moving: each pass's rows are one position after those of the
    previous pass, as in a chain of one head. Otherwise each pass has its own module, and rows keep their positions.
    """
    attend, positions = UnrolledAttend(texts_of(places)), places.flatten()
    h = head.fuse(captured)
    for j in range(num_passes):
        token = inputs.roll(-1 - j, dims=1).flatten()  # at p + 1 + j
        y = head(token, h, positions + j if moving else positions, attend, j)
        yield y
        h = head.feedback(y, j)


class Passes(nn.Module):
    """A module of all passes of a head, so that torch.func.functional_call can run them with other weights."""

    def __init__(self, head: DraftHead, num_passes: int, moving: bool) -> None:
        super().__init__()
        self.head, self.num_passes, self.moving = head, num_passes, moving

    def forward(self, inputs: Tensor, places: Tensor, captured: Tensor) -> list[Tensor]:
        """Return the output of each pass, [B * S, W]. inputs, places [B, S], captured [B * S, n * Ht]: as in unroll."""
        return list(unroll(self.head, inputs, places, captured, self.num_passes, self.moving))


class _Logits(nn.Module):
    """A module of the logits of all passes, for the same purpose as Passes."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits [b, Vd] fp32 of each pass. outputs: output [b, W] of each pass."""
        return [self.head.logits(y, j) for j, y in enumerate(outputs)]


class TrainingLoss(Protocol):
    """A loss of one training batch, with metrics of the last one for the log."""

    def begin(self, progress: float) -> None:
        """Prepare for a step that begins now. progress: fraction of the run that is over, 0 to 1."""
        ...

    def __call__(self, *training_batch: Tensor) -> Tensor:
        """Return the loss. training_batch: the fields of a TrainingBatch."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        ...


class HeadLoss:
    """A draft head's loss of one training batch.

    capture_layers: LAST_STATE = the head reads the last hidden states, else the captured ones. moving: as for unroll.
    dtype: dtype of the arithmetic; gradients accumulate in the head's fp32 weights. single_pass: the first share of the
    run, in which only pass 0 runs and is trained (K = 1).

    Pass j has a label at row p under three conditions. The row at p + 1 + j belongs to the same text and window; that
    row is `taught`; the draft vocabulary contains the target's choice after it.

    After a call `agreement` [K] is the rate at which passes 0..j all equal the target's arg-max. The rate is over the
    rows where all K passes are taught; an id outside the draft vocabulary counts as a miss.
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
        single_pass: float = 0.0,
    ) -> None:
        self.head, self.target, self.dtype, self.objective = head, target, dtype, objective
        self.most_passes, self.num_passes, self.single_pass = num_passes, num_passes, single_pass
        self.agreement = torch.zeros(num_passes)
        self.reads_last = tuple(capture_layers) == LAST_STATE
        self.moving, self.logits = moving, _Logits(head)
        self.begin(0.0)
        # rows of the target's lm_head for the draft ids, gathered once; packed rows cannot be gathered
        whole = len(head.target_ids) == target.spec.vocab_size
        self.says = None if whole or target.head.is_packed else target.head.weight.detach()[head.target_ids]

    def begin(self, progress: float) -> None:
        """Choose the passes of the next step. progress: share of the run that is over, 0 to 1."""
        self.num_passes = 1 if progress < self.single_pass else self.most_passes
        self.passes = Passes(self.head, self.num_passes, self.moving)

    def __call__(self, *training_batch: Tensor) -> Tensor:
        """Return the loss, a scalar in fp32. training_batch: the fields of a TrainingBatch."""
        one, weight = TrainingBatch(*training_batch), self.objective
        weights = {name: parameter.to(self.dtype) for name, parameter in self.head.named_parameters(prefix="head")}
        states = (one.last if self.reads_last else one.captured).flatten(0, 1).to(self.dtype)
        outputs: list[Tensor] = torch.func.functional_call(self.passes, weights, (one.inputs, one.places, states))
        last = one.last.flatten(0, 1)
        taught = torch.stack([taught_ahead(one, 1 + j).flatten() for j in range(self.num_passes)])  # [K, B * S]
        best = self.head.draft_ids[one.best].flatten()  # -1: no draft id
        goals = torch.stack([best.roll(-1 - j) for j in range(self.num_passes)])  # [K, B * S]
        known = taught & (goals >= 0)
        shares = torch.tensor([STEP_WEIGHT**j for j in range(self.num_passes)])
        shares = shares / shares.sum()
        counts = weight.tokens * shares / known.sum(1).clamp(min=1)  # weight of one row of pass j
        hits = torch.zeros_like(known)

        def block(rows: Tensor, outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
            ahead = rows[:, None] + 1 + torch.arange(self.num_passes)  # [b, K], past the end where there is no label
            ahead = ahead.clamp(max=len(last) - 1)
            ahead, place = torch.unique(ahead, return_inverse=True)
            probs, part = self._probs(last[ahead]), torch.zeros(())
            said: list[Tensor] = torch.func.functional_call(self.logits, dict(weights), (outputs,))
            for j, logits in enumerate(said):
                wanted = goals[j, rows]
                each, right = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
                    logits, probs[place[:, j]], wanted.clamp(min=0), weight.hard
                )
                part = part + counts[j] * (each * known[j, rows]).sum()
                hits[j, rows] = known[j, rows] & right
            return part

        size = rows_of_logits(len(self.head.target_ids))
        total = in_blocks(block, known.any(0).nonzero()[:, 0], outputs, weights, size)
        if weight.features:
            for j, output in enumerate(outputs):
                rows = taught[j].nonzero()[:, 0]
                gap = F.smooth_l1_loss(output[rows].float(), last[rows + 1 + j].float(), reduction="sum")
                total = total + shares[j] * weight.features * gap / max(output[rows].numel(), 1)
        chains = taught.all(0)
        self.agreement = hits.int().cumprod(0)[:, chains].sum(1) / chains.sum().clamp(min=1)
        return total

    def metrics(self) -> dict[str, float]:
        """Return the simulated greedy acceptance length of chains of K along the last training batch's text."""
        return {"acceptance_length": 1.0 + float(self.agreement.sum())}

    @torch.no_grad()
    def _probs(self, last: Tensor) -> Tensor:
        """Return the target's distribution over the draft vocabulary, [n, Vd] fp32, for its hidden states [n, Ht]."""
        if self.says is not None:
            return F.linear(last, self.says).float().softmax(-1)
        logits = self.target.logits(last)
        whole = logits.shape[-1] == len(self.head.target_ids)
        return (logits if whole else logits[:, self.head.target_ids]).softmax(-1)
