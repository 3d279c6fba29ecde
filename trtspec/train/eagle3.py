"""Learning an EAGLE3 head for a given target, on the target's own hidden states.

Training-time test (EAGLE-3, section 3.2): the head is unrolled over K passes as in inference, so that it learns to read
its own output in place of the target's hidden states. At pass j row p holds the token at p + 1 + j and the output of
pass j - 1; it attends to pass 0 of the rows up to p, as the cache holds them when a chain starts, and to its own
earlier passes. What it should say is the target's distribution of the token at p + 2 + j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.eagle3 import Eagle3Head, Eagle3Spec
from trtspec.train.data import Tokens, Windows
from trtspec.train.language_model import CausalAttend, compiled

Lesson = tuple[Tensor, Tensor, Tensor, Tensor]
"""ids [B, S], next ids [B, S], captured hidden states [B, S, n * Ht], the target's last hidden states [B, S, Ht]."""

STEP_WEIGHT = 0.8
"""Each pass counts this much of the one before it: later drafts are reached less often."""


class UnrolledAttend:
    """Attention of the unrolled passes over `batch` windows of S rows, packed; one call a pass."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []  # of each pass so far, [B, Hq, S, D]
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.keys:
            out = CausalAttend(self.batch)(layer, q, k, v)
        groups = q.shape[1] // k.shape[1]
        self.keys.append(self._heads_first(k.repeat_interleave(groups, dim=1)))
        self.values.append(self._heads_first(v.repeat_interleave(groups, dim=1)))
        return out if len(self.keys) == 1 else self._later(self._heads_first(q)).transpose(1, 2).reshape(q.shape)

    def _later(self, q: Tensor) -> Tensor:
        """Pass 0 causally, later passes at the row itself: [B, Hq, S, D]."""
        S = q.shape[2]
        scores: Tensor = q @ self.keys[0].transpose(-1, -2)  # [B, Hq, S, S]
        future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        scores = torch.cat((scores.masked_fill(future, float("-inf")), *own), dim=-1)
        weights = (scores.float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        out: Tensor = weights[..., :S] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., S + i : S + i + 1] * value
        return out

    def _heads_first(self, x: Tensor) -> Tensor:  # [B * S, heads, D] -> [B, heads, S, D]
        return x.view(self.batch, -1, x.shape[-2], x.shape[-1]).transpose(1, 2)


@torch.no_grad()
def new_head(
    target: Decoder, capture_layers: Sequence[int], target_ids: Tensor, intermediate_size: int | None = None
) -> Eagle3Head:
    """An untrained head of the target's shape, fp32, seeded by torch's generator.

    target_ids [Vd]: its draft vocabulary. Its lm_head and norm begin as the target's, for the draft ids; the embedding
    is the target's and stays it.
    """
    layer = replace(
        target.spec,
        num_layers=1,
        windows=(None,),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        intermediate_size=intermediate_size or target.spec.intermediate_size,
    )
    head = Eagle3Head(
        Eagle3Spec(
            layer=layer,
            target_hidden_size=target.spec.hidden_size,
            num_captured=len(capture_layers),
            draft_vocab_size=len(target_ids),
        )
    )
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            writes = name.endswith(("attention.o.weight", "mlp.down.weight"))
            parameter.normal_(0.0, parameter.shape[1] ** -0.5 * (0.5 if writes else 1.0))
    head.set_vocabulary(target_ids)
    cast(Tensor, head.head.weight).copy_(target.head.weight[target_ids].float())
    head.norm.weight.copy_(target.norm.weight.float())
    head.share(target.embedding, target.head)
    target.requires_grad_(False)
    return head


def frequent_tokens(tokens: Tokens, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent ids of `tokens`, ascending, [count] int64; rarer ties go to the lower id."""
    if not 0 < count <= vocab_size:
        raise ConfigError(f"draft_vocab_size={count}: the target's vocabulary has {vocab_size} ids; use 1 to that many")
    occurrences = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size)
    chosen = np.argsort(-occurrences, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen))


@dataclass(frozen=True)
class Lessons:
    """Windows of tokens, and what the target makes of them, computed when asked."""

    windows: Windows
    target: Decoder  # in training mode: its linears are torch's own
    capture_layers: tuple[int, ...]

    def batch(self, index: int) -> Lesson:
        """See Windows.batch."""
        inputs, following = self.windows.batch(index)
        return inputs, following, *observe(self.target, self.capture_layers, inputs)


def observe(target: Decoder, capture_layers: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """inputs [B, S] -> captured [B, S, n * Ht], last hidden states [B, S, Ht]."""
    batch, seq = inputs.shape
    with torch.no_grad():
        positions = torch.arange(seq, device=inputs.device).repeat(batch)
        hidden, captured = target.capture(inputs.reshape(-1), positions, CausalAttend(batch), capture_layers)
    return captured.view(batch, seq, -1), hidden.view(batch, seq, -1)


class Unrolled(nn.Module):
    """A head as it is trained: K passes over whole windows."""

    def __init__(self, head: Eagle3Head, num_passes: int, hard: float) -> None:
        super().__init__()
        self.head, self.num_passes, self.hard = head, num_passes, hard

    def forward(self, following: Tensor, captured: Tensor, best: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """following [B, S], captured [B * S, n * Ht], best [B, S] (the target's arg-max as draft id, or -1), probs
        [B, S, Vd] (the target's distribution over the draft vocabulary) -> loss, agreement [K] (see Eagle3Loss)."""
        batch, seq = following.shape
        K, rows = self.num_passes, seq - self.num_passes
        attend = UnrolledAttend(batch)
        positions = torch.arange(seq, device=following.device).repeat(batch)
        h = self.head.fuse(captured)
        total = torch.zeros((), device=following.device)
        right = torch.ones(batch, rows, dtype=torch.bool, device=following.device)
        agreement = []
        for j in range(K):
            token = following.roll(-j, dims=1).reshape(-1)  # at p + 1 + j; wrapped rows are cut off below
            h = self.head(token, h, positions + j, attend)
            log_probs = self.head.logits(h).log_softmax(-1).view(batch, seq, -1)[:, :rows]
            goal, spread = best[:, 1 + j : 1 + j + rows], probs[:, 1 + j : 1 + j + rows]
            known = goal >= 0
            pick = log_probs.gather(-1, goal.clamp(min=0)[..., None])[..., 0]
            each = self.hard * pick + (1.0 - self.hard) * (spread * log_probs).sum(-1)
            total = total - STEP_WEIGHT**j * (each * known).sum() / known.sum().clamp(min=1)
            right = right & (log_probs.argmax(-1) == goal)
            agreement.append(right.float().mean())
        return total / sum(STEP_WEIGHT**j for j in range(K)), torch.stack(agreement).detach()


class Eagle3Loss:
    """The loss of one lesson. `hard`: share against the target's arg-max, the rest against its distribution.

    After a call `agreement` [K] says how often passes 0..j all hit the target's arg-max.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: Decoder,
        num_passes: int,
        dtype: torch.dtype,
        hard: float = 0.5,
        compile: bool = True,
    ) -> None:
        self.agreement = torch.zeros(num_passes)
        unrolled = Unrolled(head, num_passes, hard)

        def loss(following: Tensor, captured: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = target.logits(last.flatten(0, 1))  # [B * S, V]
                best = head.draft_ids[wanted.argmax(-1)].view(following.shape)
                probs = wanted[:, head.target_ids].softmax(-1).view(*following.shape, -1)
            # as in logits_in: cast weights, fp32 gradients
            weights = {name: parameter.to(dtype) for name, parameter in unrolled.named_parameters()}
            arguments = (following, captured.flatten(0, 1).to(dtype), best, probs)
            return cast("tuple[Tensor, Tensor]", torch.func.functional_call(unrolled, weights, arguments))

        self._loss = compiled(loss) if compile else loss

    def __call__(self, inputs: Tensor, following: Tensor, captured: Tensor, last: Tensor) -> Tensor:
        loss, self.agreement = self._loss(following, captured, last)
        return loss

    def metrics(self) -> dict[str, float]:
        """Simulated greedy acceptance length of chains of K along the last lesson's text."""
        return {"acceptance_length": 1.0 + float(self.agreement.sum())}
