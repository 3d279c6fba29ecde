"""A worker whose drafts are right about as often as not, and a run of all cases at once."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.e2e.tiny import Case, Outcome
from trtspec import LLM, RequestOutput
from trtspec.core import SamplingTensors
from trtspec.methods.worker import SpecWorker


class Teller(SpecWorker):
    """A worker that drafts the token that a request will sample or, for every third position, makes its own guess.

    It knows a request by its seed. Batches of greedy requests have no seeds, so there it only guesses.
    """

    def __init__(self, inner: SpecWorker, cases: list[Case], outcomes: list[Outcome]) -> None:
        super().__init__(inner.head, inner.max_draft_len, inner.capture_layers, inner.greedy)
        self.answers = {
            signed(case.params.seed): case.prompt + outcome.token_ids
            for case, outcome in zip(cases, outcomes, strict=True)
        }

    def sample_drafts(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None
    ) -> Tensor:
        guesses = super().sample_drafts(step, hidden, sampling, probs)
        if not sampling.seeds.numel():
            return guesses
        asked = zip(sampling.seeds.tolist(), sampling.positions.tolist(), guesses.tolist(), strict=True)
        return torch.tensor([self.told(*one) for one in asked])

    def told(self, seed: int, place: int, guess: int) -> int:
        answer = self.answers.get(seed, [])
        return answer[place] if place < len(answer) and (seed + place) % 3 else guess


def signed(seed: int | None) -> int:
    """The seed as 64 signed bits, as in a tensor."""
    assert seed is not None
    return seed - 2**64 if seed >= 2**63 else seed


def generated(llm: LLM, cases: list[Case]) -> list[RequestOutput]:
    """Generate the outputs of all cases at once."""
    prompts, params = [case.prompt for case in cases], [case.params for case in cases]
    return llm.generate(prompts, params, use_tqdm=False)
