"""Backends compared in half precision: the same ids, or a first difference that rounding can explain.

Another backend may round a sum otherwise, and where two ids are almost equally good that decides. So at the first
difference of an output both backends' ids are looked up in what one of them drew from: logits, filters and noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import trtspec.workers.base as sampling
from tests.e2e.tiny import Case, Outcome
from trtspec.engine.core import EngineCore
from trtspec.ops import gumbel_noise, process_logits, spec_sample

BF16_ULP = 2.0**-8
"""Between bf16 numbers just below a power of two, relative to it; rounding is off by half of it at most."""


@dataclass(frozen=True)
class Draw:
    """One row that an id was drawn from. logits: as they left the lm_head; kept: after filters, by temperature."""

    logits: Tensor  # [V]
    kept: Tensor  # [V]
    temperature: float
    noise: Tensor  # [V]

    def gap(self, better: int, other: int) -> float:
        """How far `other` was behind `better`, which was drawn, in ulps of the largest logit. An id that a filter
        removed is as far from the worst that it left, if that is more."""
        behind = (self.kept + self.noise)[better] - (self.logits / self.temperature + self.noise)[other]
        if self.kept[other].isinf():
            boundary = self.kept[self.kept.isfinite()].min() - self.logits[other] / self.temperature
            behind = torch.maximum(behind, boundary)
        ulp = BF16_ULP * float(self.logits.abs().max()) / self.temperature
        return float(behind) / ulp


@contextmanager
def recorded_draws() -> Iterator[dict[int, Draw]]:
    """What eager engines draw from meanwhile, by the position of the token drawn; one request at a time."""
    draws: dict[int, Draw] = {}
    raw: list[Tensor] = []

    def process(logits: Tensor, positions: Tensor, **groups: Tensor) -> Tensor:
        raw.append(logits)
        return process_logits(logits, positions, **groups)

    def sample(kept: Tensor, greedy: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        logits = raw.pop()
        for row, position in enumerate(positions.tolist()):
            noise = torch.zeros_like(kept[row])
            if not greedy[row]:
                noise = gumbel_noise(seeds[row, None], positions[row, None], torch.arange(kept.shape[1]))[0]
            finite = kept[row].isfinite()
            nonzero = finite & (logits[row] != 0)
            scale = 1.0 if not nonzero.any() else float((logits[row] / kept[row])[nonzero].median())
            draws[position] = Draw(logits[row].clone(), kept[row].clone(), scale, noise)
        return spec_sample(kept, greedy, seeds, positions, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "process_logits", process)
        patch.setattr(sampling, "spec_sample", sample)
        yield draws


def first_gaps(eager: EngineCore, cases: list[Case], ours: list[Outcome], theirs: list[Outcome]) -> dict[int, float]:
    """For each case whose `theirs` differs from `ours`, which `eager` gave: the gap at the first difference."""
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
        gaps[index] = draws[len(case.prompt) + at].gap(*pairs[at])
    return gaps
