"""The loop with a step in flight has the outcomes of the loop that waits for every step."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.async_stand_in import ThreadedExecutable, random_delay
from tests.e2e.head_cases import watch
from tests.e2e.tiny import VOCAB, Case, Outcome, assert_all_blocks_free, draw_cases, run_alone
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, SamplingParams
from trtspec.core import StepInputs
from trtspec.engine.faults import launch_isolated
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduled
from trtspec.errors import DeviceError, EngineError
from trtspec.sampling_params import RequestSampling

K = 3
GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 48}


class Failing:
    """A hook that fails the next launch if `next` is set, and every launch with a marked request."""

    def __init__(self) -> None:
        self.next = False
        self.marked: set[int] = set()
        self.failures = 0

    def __call__(self, inputs: StepInputs) -> None:
        if self.next or self.marked.intersection(inputs.spec.request_ids):
            self.next = False
            self.failures += 1
            raise RuntimeError("told to")


def overlapped(llm: LLM, seed: int = 0, before: Callable[[StepInputs], None] = lambda inputs: None) -> OverlapLoop:
    """Replace the engine's loop by one that runs its target in a thread."""
    loop = llm.engine.loop
    fields = {field.name: getattr(loop, field.name) for field in dataclasses.fields(loop) if field.init}
    loop.scheduler.allocator.debug = True
    target = ThreadedExecutable(loop.target, loop.input_builder.max_draft_len, VOCAB, random_delay(seed), before)
    ahead = OverlapLoop(**{**fields, "target": target})
    llm.engine.loop = ahead
    return ahead


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("overlap"), target, (0, 1), tuple(range(11)))


@pytest.fixture(scope="module")
def alone(target: Path) -> Callable[[int], list[Outcome]]:
    """seed -> the outcome of each of the 16 cases of that seed alone, computed when first asked for."""

    def run(seed: int) -> list[Outcome]:
        with LLM(target, enable_prefix_caching=False, num_kv_blocks=500) as llm:
            return run_alone(llm.engine, draw(16, seed))

    return functools.cache(run)


def draw(count: int, seed: int) -> list[Case]:
    """Random cases. Some share a prompt."""
    rng = random.Random(seed)
    cases = draw_cases(count, seed, most_prompt=60, most_tokens=30)
    for number in range(1, count):
        if rng.random() < 0.25:
            cases[number] = dataclasses.replace(cases[number], prompt=[*cases[rng.randrange(number)].prompt])
    return cases


@pytest.mark.parametrize("seed", [0, 3, 4, 7, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 5, 6))])
@pytest.mark.parametrize("speculates", [True, False])
def test_ids_are_those_of_the_loop_that_waits(
    target: Path, folder: Path, alone: Callable[[int], list[Outcome]], speculates: bool, seed: int
) -> None:
    """Outcomes are those of the loop that waits.

    Arrivals, stops, aborts, failing launches, prompts in chunks, full caches and prefix hits come in random order. The
    allocator checks that no block becomes free while a step in flight includes it.
    """
    rng = random.Random(f"{speculates} {seed}")
    cases, outcomes = draw(16, seed), alone(seed)
    answers = [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": K} if speculates else None
    blocks = {"num_kv_blocks": rng.choice((27, 40, 80)), "block_size": 4}
    with LLM(target, speculation, enable_prefix_caching=rng.random() < 0.5, **LIMITS, **blocks) as llm:
        if speculates:
            watch(llm, answers, rng.choice((0.0, 0.3)))
        failing = Failing()
        loop = overlapped(llm, seed, failing)
        engine = llm.engine
        requests: list[Request] = []
        aborted: set[int] = set()
        pending = list(cases)
        while pending or engine.has_work:
            event = rng.random()
            if pending and event < 0.15:
                requests += engine.add_request(pending[0].prompt, pending.pop(0).params)
            elif event < 0.17 and requests:
                aborted.add(number := rng.randrange(len(requests)))
                engine.abort(requests[number].request_id)
            elif event < 0.19:
                failing.next = True
            elif engine.has_work:
                engine.step()
        assert_all_blocks_free(llm)
        assert loop.target.most_waiting == 2, "a step was to be in flight while the next one was launched"
    for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        if number not in aborted:
            assert request.error is None
            assert Outcome.of(request) == outcome


def test_a_request_that_cannot_be_launched_fails_alone(target: Path) -> None:
    """A request that cannot be launched fails alone.

    Every launch with it fails. The others are launched again, and their ids are unchanged.
    """
    cases = [dataclasses.replace(case, params=dataclasses.replace(case.params, stop=())) for case in draw(5, 3)]
    with LLM(target, enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(target, num_kv_blocks=100, block_size=4, **LIMITS) as llm:
        failing = Failing()
        overlapped(llm, 1, failing)
        requests = [request for case in cases for request in llm.engine.add_request(case.prompt, case.params)]
        failing.marked.add(requests[2].request_id)
        while llm.engine.has_work:
            llm.engine.step()
        assert_all_blocks_free(llm)
    assert failing.failures > 1
    assert str(requests[2].error) == "told to"
    del requests[2], outcomes[2]
    assert [Outcome.of(request) for request in requests] == outcomes


def test_a_token_that_is_none_ends_its_request_alone(target: Path) -> None:
    """A token that is none ends its request alone.

    Its id is past the vocabulary, and the step in flight has read it.
    """
    with LLM(target, num_kv_blocks=100, block_size=4, **LIMITS) as llm:
        loop = overlapped(llm, 2)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        banned = dataclasses.replace(params, ignore_eos=False, min_tokens=3, stop_token_ids=list(range(VOCAB)))
        (good,) = llm.engine.add_request([1, 2, 3], params)
        (bad,) = llm.engine.add_request([3, 2, 1], banned)
        while llm.engine.has_work:
            llm.engine.step()
        assert_all_blocks_free(llm)
    assert loop.target.failures == 0
    assert bad.finish_reason == "error"
    assert "no token can be drawn" in str(bad.error)
    assert good.finish_reason == "length"


def test_plain_decoding_launches_nothing_in_vain(target: Path) -> None:
    """An end by length is known beforehand: 1 launch for the prompt, and 11 for the tokens after the first."""
    with LLM(target, num_kv_blocks=100, **LIMITS) as llm:
        loop = overlapped(llm)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for prompt in ([1, 2, 3], [4, 5]):
            llm.engine.add_request(prompt, params)
        while llm.engine.has_work:
            llm.engine.step()
        assert loop.target.inner.launches == 12


def test_a_device_that_is_lost_ends_all_requests(target: Path) -> None:
    """A lost device ends all requests. Nothing is launched on it again, and the engine stops."""
    calls = []

    def lose(inputs: StepInputs) -> None:
        calls.append(inputs.spec.request_ids)
        if len(calls) == 5:
            raise DeviceError("the GPU is gone")

    llm = LLM(target, num_kv_blocks=100, **LIMITS)
    overlapped(llm, before=lose)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    running = [llm.generate_async([1, 2, 3], params) for _ in range(3)]
    for generation in running:
        with pytest.raises(EngineError, match="the GPU is gone"):
            generation.result(timeout=60)
    assert len(calls) <= 6  # one more was in flight
    with pytest.raises(EngineError, match="the GPU is gone"):
        llm.generate_async([1], params)


@pytest.mark.parametrize("ahead", [True, False])
def test_no_step_is_launched_again_on_a_lost_device(target: Path, ahead: bool) -> None:
    """No step is launched again on a lost device.

    That holds for the loop that launches ahead, and for the one whose steady batches do not read their requests.
    """
    tried: list[int] = []

    def lose(*args: Any) -> Any:
        tried.append(len(tried))
        raise DeviceError("the GPU is gone")

    with LLM(target, num_kv_blocks=100, **LIMITS) as llm:
        loop: Any = overlapped(llm) if ahead else llm.engine.loop
        llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True))
        for _ in range(3):
            llm.engine.step()
        assert ahead or loop.steady is not None
        loop.target.run = loop.target.launch = lose
        with pytest.raises(DeviceError):
            llm.engine.step()
        assert len(tried) == 1


def test_a_lost_device_is_not_tried_again() -> None:
    tried = []

    def launch(batch: Batch) -> None:
        tried.append(batch)
        raise DeviceError("gone")

    row = Scheduled(Request(0, [1], 1, GREEDY, 9, 0, frozenset(), frozenset(), False, None), 1, 0, True)
    with pytest.raises(DeviceError):
        launch_isolated((row, row), launch)
    assert len(tried) == 1


def test_the_engine_s_thread_ends_with_nothing_in_flight(target: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(target, num_kv_blocks=100, **LIMITS) as llm:
        (whole,) = llm.generate([[1, 2, 3]], params)
        stop = whole.outputs[0].token_ids[7]
        overlapped(llm)
        params = dataclasses.replace(params, stop_token_ids=[stop])
        assert llm.generate_async([1, 2, 3], params).result(60).outputs[0].finish_reason == "stop"
        assert not llm.engine.has_work
        assert_all_blocks_free(llm)


def test_from_other_threads(target: Path) -> None:
    """Streams that run at the same time return the right text."""
    with LLM(target, num_kv_blocks=100, block_size=4, **LIMITS) as llm:
        cases = draw(8, 5)
        outcomes = run_alone(llm.engine, cases)
        overlapped(llm, 3)
        streams = [llm.generate_async(case.prompt, case.params) for case in cases]
        texts = ["".join(delta.text for delta in stream) for stream in streams]
        assert texts == [outcome.text for outcome in outcomes]
