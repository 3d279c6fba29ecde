"""Backends compared in half precision: the same ids, or a first difference that rounding can explain.

Another backend may round a sum differently. That decides between two ids whose scores are almost equal. So at the first
difference of an output, both ids are looked up in the logits, filters and noise that one backend sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import trtspec.methods.draw as sampling
from tests.e2e.tiny import Case, Outcome
from trtspec.engine.core import EngineCore
from trtspec.ops import gumbel_noise, process_logits, spec_sample

BF16_ULP = 2.0**-8
"""Distance of bf16 numbers just below a power of two, relative to it. Rounding is off by at most half of it."""


@dataclass(frozen=True)
class Draw:
    """One row of logits that an id was sampled from, with its noise and filters."""

    logits: Tensor  # [V] divided by the temperature, -inf where banned
    noise: Tensor  # [V]
    top_k: int  # 0: off, as in the next two
    top_p: float
    min_p: float

    def gap(self, other: int) -> float:
        """Distance by which logits must move for `other` to be sampled, in ulps of the largest logit.

        Every id that scores higher must fall below `other` or leave the filters, and `other` must stay within them.
        """
        scores, inside = self.logits + self.noise, self.inside()
        ahead = (scores > scores[other]) & (inside >= 0)
        gap = torch.minimum(scores - scores[other], inside)[ahead]
        needed = max(0.0, float(-inside[other]), *gap.tolist())
        return needed / (BF16_ULP * float(self.logits[self.logits.isfinite()].abs().max()))

    def inside(self) -> Tensor:
        """[V]: distance by which logits must move against each other for a filter to change its decision on an id.

        It is negative for ids that a filter removed.
        """
        x, V = self.logits, self.logits.shape[0]
        distance = torch.where(x.isfinite(), float("inf"), float("-inf"))
        left = x
        if 0 < self.top_k < V:
            last, next_one = x.topk(self.top_k + 1).values[-2:]
            distance = torch.minimum(distance, torch.where(x >= last, x - next_one, x - last))
            left = torch.where(x >= last, x, float("-inf"))
        if 0 < self.top_p < 1:
            # An id stays if the mass m of all more likely ids is below p. If their logits fall and all others rise, by
            # d relative to each other, then log(m / (1 - m)) falls by d.
            weights = left.softmax(0).double()
            above = torch.stack([weights[x > value].sum() for value in x])
            bound = torch.tensor(self.top_p, dtype=torch.float64)
            distance = torch.minimum(distance, (bound.logit() - above.clamp(max=1.0).logit()).float())
        if self.min_p > 0:
            distance = torch.minimum(distance, x - x.max() - math.log(self.min_p))
        return distance


@contextmanager
def recorded_draws() -> Iterator[dict[int, Draw]]:
    """Record the rows that eager engines sample from, by position of the sampled token. For one request at a time."""
    draws: dict[int, Draw] = {}
    before: list[tuple[Tensor, dict[str, Tensor]]] = []  # logits before the filters

    def process(logits: Tensor, positions: Tensor, **groups: Tensor) -> Tensor:
        off = {name: groups[name].new_empty(0) for name in ("top_ks", "top_ps", "min_ps")}
        before.append((process_logits(logits, positions, **{**groups, **off}), groups))
        return process_logits(logits, positions, **groups)

    def sample(kept: Tensor, greedy: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        logits, groups = before.pop()
        for row, position in enumerate(positions.tolist()):
            noise = torch.zeros_like(kept[row])
            if not greedy[row]:
                noise = gumbel_noise(seeds[row, None], positions[row, None], torch.arange(kept.shape[1]))[0]
            top_k, top_p, min_p = (
                groups[name][row].item() if groups[name].numel() else 0 for name in ("top_ks", "top_ps", "min_ps")
            )
            draws[position] = Draw(logits[row].clone(), noise, int(top_k), top_p, min_p)
        return spec_sample(kept, greedy, seeds, positions, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "process_logits", process)
        patch.setattr(sampling, "spec_sample", sample)
        yield draws


def first_gaps(eager: EngineCore, cases: list[Case], ours: list[Outcome], theirs: list[Outcome]) -> dict[int, float]:
    """For each case whose `theirs` differs from `ours`: the gap at the first difference.

    `ours` are eager's outcomes.
    """
    gaps = {}
    for index, (case, our, their) in enumerate(zip(cases, ours, theirs, strict=True)):
        if our == their:
            continue
        pairs = list(zip(our.token_ids, their.token_ids, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert at is not None, f"case {index}: {our} and {their} differ in more than ids"
        with recorded_draws() as draws:
            (request,) = eager.add_request(case.prompt, case.params)
            while not request.finished:
                eager.step()
        assert request.output_ids == our.token_ids
        draw = draws[len(case.prompt) + at]
        assert draw.gap(pairs[at][0]) < 0.01  # sampled; sums of probabilities are rounded differently here
        gaps[index] = draw.gap(pairs[at][1])
    return gaps
