"""The GPU's executable without a GPU: the same static regions, buckets, graphs and carried inputs, with a thread of the
CPU for a device and work done again for a graph. Ids are eager decoding's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.async_stand_in import HostQueue, random_delay
from tests.checkpoints import make_eagle3
from tests.e2e.heads import step_of
from tests.e2e.tiny import Case, Outcome, assert_all_blocks_free, draw_cases, run_alone, run_together
from trtspec import LLM
from trtspec.backends.cudagraph import LaunchLimits, ModuleOnCuda, module_graphs
from trtspec.core import SamplingTensors
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.stats import TimedExecutable
from trtspec.workers.eagle import Eagle3OneModelWorker

K = 3
LIMITS: dict[str, Any] = {"max_batch_size": 5, "max_num_tokens": 48, "block_size": 4, "num_kv_blocks": 90}


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("cuda"), target, (0, 1), tuple(range(11)))


class Teller(Eagle3OneModelWorker):
    """Says what a request will draw, as its seed tells which one it is, or, every third time, another token. Batches of
    greedy requests have no seeds: there it guesses."""

    def __init__(self, inner: Eagle3OneModelWorker, cases: list[Case], outcomes: list[Outcome]) -> None:
        super().__init__(inner.head, inner.max_draft_len, inner.capture_layers, inner.greedy)
        self.answers = {
            signed(case.params.seed): case.prompt + outcome.token_ids
            for case, outcome in zip(cases, outcomes, strict=True)
        }

    def sample_drafts(self, hidden: Tensor, sampling: SamplingTensors) -> Tensor:
        guesses = super().sample_drafts(hidden, sampling)
        if not sampling.seeds.numel():
            return guesses
        asked = zip(sampling.seeds.tolist(), sampling.positions.tolist(), guesses.tolist(), strict=True)
        return torch.tensor([self.told(*one) for one in asked])

    def told(self, seed: int, place: int, guess: int) -> int:
        answer = self.answers.get(seed, [])
        return answer[place] if place < len(answer) and (seed + place) % 3 else guess


def signed(seed: int | None) -> int:
    """As 64 bits of a tensor have it."""
    assert seed is not None
    return seed - 2**64 if seed >= 2**63 else seed


def on_queue(llm: LLM, work: HostQueue, overlaps: bool) -> ModuleOnCuda:
    """The engine's target, on a queue."""
    loop = llm.engine.loop
    timed = loop.target
    assert isinstance(timed, TimedExecutable)
    step, kv = timed.inner.step, timed.inner.kv
    shapes = [tuple(layer[0].shape[2:]) for layer in kv]
    compiled = module_graphs(step, shapes, range(loop.assemble.max_draft_len + 1))
    limits = LaunchLimits(LIMITS["max_batch_size"], max_columns=50)
    executable = ModuleOnCuda(step, compiled, kv, work, limits)
    fields = {field.name: getattr(loop, field.name) for field in dataclasses.fields(loop) if field.init}
    loop.scheduler.allocator.debug = True
    if compiled.makes_drafts:
        loop.assemble.graph_draft_lens = compiled.draft_lens
    kind = OverlapLoop if overlaps else type(loop)
    llm.engine.loop = kind(**{**fields, "target": executable})
    return executable


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("mode", ["none", "eagle3", "ngram"])
def test_ids_are_those_of_eager_decoding(target: Path, folder: Path, mode: str, overlaps: bool) -> None:
    if mode == "ngram" and overlaps:
        pytest.skip("its drafts come from the host")
    cases = draw_cases(24, 5, most_prompt=60, most_tokens=70)
    with LLM(target, enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    speculation = {
        "none": None,
        "eagle3": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": K},
        "ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1},
    }[mode]
    with LLM(target, speculation, **LIMITS) as llm:
        work = HostQueue(random_delay(1, 0.002))
        if mode == "eagle3":
            step = step_of(llm)
            assert isinstance(step.worker, Eagle3OneModelWorker)
            step.worker = Teller(step.worker, cases, outcomes)
        executable = on_queue(llm, work, overlaps)
        executable.capture()
        captured = work.num_captured
        run = run_together(llm.engine, cases)
        assert run.outcomes == outcomes
        assert_all_blocks_free(llm)
    assert captured >= 2 * len(executable._limits.buckets)
    assert work.num_replayed >= 10
    if mode != "none":
        accepted = run.speculation.acceptance_per_position
        assert len(accepted) == K
        assert all(0 < rate < 1 for rate in accepted)
