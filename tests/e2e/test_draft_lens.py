"""A worker chooses for each request the number of drafts to verify, which changes no token.

The number of drafts that the engine counts as offered is the number that there were.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.async_stand_in import HostQueue, ThreadedExecutable, random_delay
from tests.e2e.conformance import (
    CASES,
    LIMITS,
    TIGHT,
    K,
    assert_words_are_those_of_eager,
    build,
    make_models,
    packed,
    speculation,
)
from tests.e2e.head_cases import watch
from tests.e2e.recorded import assert_graph_is_step, cases_of, record
from tests.e2e.tiny import MASK, VOCAB, Case, Outcome, Run, draw_cases, run_alone, run_together
from tests.head_checkpoints import make_dflash
from trtspec import LLM
from trtspec.backends.graph_io import graph_outputs, output_names
from trtspec.core import SpecMetadata, StepInputs, StepOutputs
from trtspec.engine.overlap import InFlightStep, OverlapLoop
from trtspec.methods.step import OneEngineStep
from trtspec.methods.worker import SpecWorker
from trtspec.protocols import Executable

FORCED = 2


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Cut every worker's drafts. Returns the last length chosen for each request, from steps with known request ids."""
    last: dict[int, int] = {}

    def draft_lens(worker: SpecWorker, drafts: Tensor, hidden: Tensor, spec: SpecMetadata) -> Tensor:
        """Lengths 0..K', different for each request and step.

        They depend on the drafts, so they are part of a graph, too.
        """
        lens = (drafts.sum(1) % (spec.next_draft_len + 1)).int()
        if spec.request_ids:
            last.update(zip(spec.request_ids, lens.tolist(), strict=True))
        return lens

    monkeypatch.setattr(SpecWorker, "draft_lens", draft_lens)
    return last


@pytest.fixture
def no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not retry a failed launch with nothing in flight: a retry would hide the failure."""

    def abandon(loop: OverlapLoop, failed: InFlightStep) -> None:
        failed.launch.wait()

    monkeypatch.setattr(OverlapLoop, "abandon", abandon)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_models(tmp_path_factory.mktemp("lens"))
    make_dflash(folder, folder / "target", (0, 1), MASK)
    return folder


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    """Outcomes of conformance.CASES, one case at a time."""
    return run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)


def fields_of(mode: str, models: Path) -> dict[str, Any]:
    if mode == "dflash":
        return {"method": "dflash", "model": str(models / "dflash"), "num_speculative_tokens": K}
    found = speculation(mode, models)
    assert found is not None
    return {name: value for name, value in found.items() if name != "draft_len_schedule"}


class Offered:
    """An executable that records the number of drafts that each request really had in each launch, in order.

    It checks that a request never had more drafts than the worker chose.
    """

    def __init__(self, inner: Executable, said: dict[int, int]) -> None:
        self.inner, self.said = inner, said
        self.fewer = 0
        self.counts: dict[int, list[int]] = defaultdict(list)

    def run(self, inputs: StepInputs) -> StepOutputs:
        spec, C = inputs.spec, inputs.spec.num_contexts
        assert 0 <= int(inputs.input_ids.min()) <= int(inputs.input_ids.max()) < VOCAB
        column = torch.arange(spec.runtime_draft_len)
        there = (column < spec.draft_lens[C:, None]) & (spec.draft_tokens >= 0)
        for request, count in zip(spec.request_ids, [0] * C + there.sum(1).tolist(), strict=True):
            assert count <= self.said.get(request, 0)
            self.fewer += count < self.said.get(request, 0)  # at a request's end, or after it was preempted
            self.counts[request].append(count)
        return self.inner.run(inputs)


def counted(run: Run) -> dict[int, list[int]]:
    """Number of drafts of each request in each of its steps, as the engine reports them.

    It checks that no more drafts are accepted than there were.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for emission in (emission for step in run.steps for emission in step):
        assert emission.num_drafts <= emission.draft_len == len(emission.drafts)
        found[emission.request.request_id].append(emission.draft_len)
    assert run.speculation.num_draft_tokens == sum(map(sum, found.values()))
    assert {count for counts in found.values() for count in counts} == set(range(K + 1))
    return found


def answers_of(cases: list[Case], outcomes: list[Outcome]) -> list[list[int]]:
    return [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]


@pytest.mark.parametrize("mode", ["eagle3", "eagle", "dflash", "draft_inside", "eagle3_two_engine"])
def test_no_token_changes(models: Path, plain: list[Outcome], said: dict[int, int], mode: str) -> None:
    """Lengths chosen by the worker change no token, in a cache too small for all, with prompts in chunks."""
    with LLM(models / "target", fields_of(mode, models), **LIMITS, num_kv_blocks=34) as llm:
        watch(llm, answers_of(CASES, plain), 0.2)
        target = Offered(llm.engine.loop.target, said)
        llm.engine.loop = dataclasses.replace(llm.engine.loop, target=target)
        run = run_together(llm.engine, CASES)
        assert llm.engine.stats.preemptions > 0
    assert run.outcomes == plain
    assert counted(run) == target.counts
    assert target.fewer < run.speculation.steps / 3
    assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


def overlapped(llm: LLM, seed: int, said: dict[int, int]) -> Offered:
    """Replace the engine's loop by one with a step in flight and its target in a thread.

    Returns the recording target.
    """
    loop = llm.engine.loop
    fields = {field.name: getattr(loop, field.name) for field in dataclasses.fields(loop) if field.init}
    offered = Offered(loop.target, said)
    target: Any = ThreadedExecutable(offered, loop.input_builder.max_draft_len, VOCAB, random_delay(seed))
    llm.engine.loop = OverlapLoop(**{**fields, "target": target})
    return offered


@pytest.mark.parametrize("seed", range(3))
def test_a_step_in_flight_has_rows_for_drafts_that_there_are_not(
    models: Path, said: dict[int, int], no_failure: None, seed: int
) -> None:
    """A step in flight has rows for drafts that do not exist, and outputs and counts are still right.

    The host learns the number of drafts when the step is over. Steps after a request's last one are discarded.
    """
    cases = draw_cases(16, seed, most_prompt=60, most_tokens=30)
    with LLM(models / "target", enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    limits = {"max_batch_size": 4, "max_num_tokens": 48, "num_kv_blocks": (27, 40, 80)[seed], "block_size": 4}
    with LLM(models / "target", fields_of("eagle3", models), **limits) as llm:
        watch(llm, answers_of(cases, outcomes), 0.2)
        offered = overlapped(llm, seed, said)
        run = run_together(llm.engine, cases, seed)
    assert run.outcomes == outcomes
    found = counted(run)
    assert found.keys() == offered.counts.keys()
    for request, counts in found.items():
        assert counts == offered.counts[request][: len(counts)]
    assert run.speculation.num_accepted_tokens > 0


def force(make: Callable[[], LLM]) -> None:
    """Check that forced acceptance accepts FORCED drafts, or all of them if there are fewer."""
    cases = draw_cases(12, 4, most_prompt=40, most_tokens=40)
    with make() as llm:
        run = run_together(llm.engine, cases)
    counted(run)
    for emission in (emission for step in run.steps for emission in step):
        if not emission.finished:
            assert emission.num_drafts == min(FORCED, emission.draft_len)


@pytest.mark.parametrize("kind", ["waits", "thread", "graphs", "kernels"])
def test_force_accepts_no_draft_that_there_is_not(
    models: Path, work: HostQueue, said: dict[int, int], no_failure: None, kind: str
) -> None:
    options: dict[str, Any] = {**LIMITS, "num_kv_blocks": 200, "force_num_accepted_tokens": FORCED}
    if kind in ("graphs", "kernels"):
        options |= {"backend": "cuda", "enable_cuda_graph": kind == "graphs"}

    def make() -> LLM:
        llm = LLM(models / "target", fields_of("eagle3", models), **options)
        if kind == "thread":
            overlapped(llm, 1, said)
        return llm

    force(make)


@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_gpu_s_graphs(models: Path, work: HostQueue, no_failure: None, graphs: bool) -> None:
    """On the stand-in for a GPU, rows of drafts that do not exist are part of both uniform and ragged graphs."""
    cases = draw_cases(16, 5, most_prompt=60, most_tokens=40)
    with LLM(models / "target", enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    options: dict[str, Any] = {"max_batch_size": 5, "max_num_tokens": 48, "block_size": 4, "num_kv_blocks": 90}
    options |= {"backend": "cuda", "debug": True, "enable_cuda_graph": graphs}
    with LLM(models / "target", fields_of("eagle3", models), **options) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop)
        run = run_together(llm.engine, cases)
    assert run.outcomes == outcomes
    assert (work.num_replayed > 10) == graphs
    counted(run)
    assert run.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("functional", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_exported_graph_tells_the_same(models: Path, functional: bool) -> None:
    """An exported graph returns the same draft lengths bit for bit, for batches with drafts of all lengths."""
    recorder = record(lambda **limits: LLM(models / "target", fields_of("eagle3", models), **limits), "sampled")
    step = recorder.inner.step
    assert isinstance(step, OneEngineStep)
    said = [
        graph_outputs(outputs, output_names(step))["next_draft_lens"] for _, _, outputs, _ in cases_of(recorder, False)
    ]
    assert set(torch.cat(said).tolist()) == set(range(K + 1))
    assert_graph_is_step(OneEngineStep(step.decoder, step.worker, functional), recorder, False, functional)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_engine"])
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_compiled_graphs_tell_the_same(
    models: Path, plain: list[Outcome], tmp_path: Path, backend: str, mode: str
) -> None:
    """Compiled graphs accept the same drafts as eager, and offer the same number of them."""
    engine = build(models, tmp_path / "engine", backend, mode, "float32")
    assert_words_are_those_of_eager(engine, models, mode, plain)
    counted(packed(LLM(engine, **TIGHT)))
