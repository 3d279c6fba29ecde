"""Nothing is lost: whatever happens to one request, the others' outputs are the same and every block comes back.

A victim is submitted first and sabotaged, and bystanders arrive while it runs. Their outputs are compared with plain
decoding of each alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import (
    PIECES,
    VOCAB,
    Case,
    LyingOracle,
    Outcome,
    assert_all_blocks_free,
    draw_cases,
    run_alone,
    run_together,
)
from tests.e2e.victims import BYSTANDERS, LIMITS, POISON, VICTIM, K, alone, right_answers, run_with_bystanders, user_llm
from trtspec import LLM, SamplingParams
from trtspec.backends.eager import EagerExecutable
from trtspec.core import StepInputs, StepOutputs
from trtspec.engine.request import Request
from trtspec.errors import RequestError
from trtspec.protocols import Executable
from trtspec.sampling_params import sample_seed
from trtspec.text import TextStream


@pytest.fixture(scope="module")
def expected(target: Path) -> list[Outcome]:
    """The outcome of each bystander alone."""
    return alone(target, BYSTANDERS)


@pytest.fixture
def llm(target: Path, draft: Path) -> LLM:
    """An LLM with a draft model, so that there are two caches to keep in order."""
    return LLM(target, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}, **LIMITS)


class LaunchFails:
    """The target, failing whenever the poison is in the rows. after: fail after KV was written, not before the run."""

    def __init__(self, inner: Executable, after: bool) -> None:
        self.inner = inner
        self.after = after

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self.after:
            outputs = self.inner.run(inputs)
        if (inputs.input_ids == POISON).any():
            raise RuntimeError("poisoned row")
        return outputs if self.after else self.inner.run(inputs)


# -- an exception in one request -----------------------------------------------------------------------------------


@pytest.fixture(params=["before", "after"])
def launch_fails(request: pytest.FixtureRequest, llm: LLM) -> LLM:
    loop = llm.engine.loop
    llm.engine.loop = dataclasses.replace(loop, target=LaunchFails(loop.target, after=request.param == "after"))
    return llm


def test_a_request_that_breaks_the_launch_fails_alone(launch_fails: LLM, expected: list[Outcome]) -> None:
    _, run = run_with_bystanders(launch_fails)
    assert run.outcomes == expected


def test_a_request_that_breaks_the_launch_gets_the_exception(launch_fails: LLM) -> None:
    (victim,), _ = run_with_bystanders(launch_fails)
    assert (victim.finish_reason, str(victim.error)) == ("error", "poisoned row")


def test_a_request_that_breaks_the_launch_frees_its_blocks(launch_fails: LLM) -> None:
    run_with_bystanders(launch_fails)
    assert_all_blocks_free(launch_fails)


def test_every_request_that_breaks_the_launch_fails_however_many(launch_fails: LLM, expected: list[Outcome]) -> None:
    victims = [launch_fails.engine.add_request(VICTIM.prompt, VICTIM.params)[0] for _ in range(3)]
    run = run_together(launch_fails.engine, BYSTANDERS)
    assert ([v.finish_reason for v in victims], run.outcomes) == (["error"] * 3, expected)


def test_samples_of_a_prompt_that_breaks_the_launch_all_fail(launch_fails: LLM) -> None:
    victims = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, n=3))
    samples, _ = run_with_bystanders(launch_fails, victims)
    assert [sample.finish_reason for sample in samples] == ["error"] * 3


def poison_embedding(llm: LLM, token: int) -> None:
    """Make rows of this token NaN, and with them all rows that see them."""
    timed: Any = llm.engine.loop.target
    executable: EagerExecutable = timed.inner
    with torch.no_grad():
        executable.step.decoder.embedding.weight[token] = float("nan")


@pytest.fixture
def nan_for_poison(llm: LLM) -> LLM:
    """An LLM in which a request with the poison has NaN in its KV and its logits."""
    poison_embedding(llm, POISON)
    return llm


def test_nan_logits_of_one_request_do_not_reach_the_others(nan_for_poison: LLM, expected: list[Outcome]) -> None:
    """NaN logits of one request do not reach the others, although they reuse its blocks, which are full of NaN."""
    _, run = run_with_bystanders(nan_for_poison)
    assert run.outcomes == expected


def test_nan_logits_are_an_error_that_says_so(nan_for_poison: LLM) -> None:
    (victim,), _ = run_with_bystanders(nan_for_poison)
    assert victim.finish_reason == "error"
    assert "NaN logits" in str(victim.error)


def test_nan_logits_free_the_blocks(nan_for_poison: LLM) -> None:
    run_with_bystanders(nan_for_poison)
    assert_all_blocks_free(nan_for_poison)


class TextFails(TextStream):
    """Host code that raises at its `at`-th token, and again when the text is finished."""

    def __init__(self, inner: TextStream, at: int) -> None:
        self.__dict__.update(inner.__dict__)
        self.at = at

    def push(self, token_ids: Iterable[int]) -> str:
        self.at -= 1
        if self.at <= 0:
            raise ValueError("broken detokenizer")
        return super().push(token_ids)

    def flush(self) -> str:
        raise ValueError("broken detokenizer")


def break_text(at: int) -> Callable[[list[Request]], None]:
    def sabotage(samples: list[Request]) -> None:
        for sample in samples:
            assert sample.text is not None
            sample.text = TextFails(sample.text, at)

    return sabotage


@pytest.mark.parametrize("at", [1, 2, 7, 1000], ids="token {}".format)
def test_host_code_that_raises_fails_its_request_alone(llm: LLM, expected: list[Outcome], at: int) -> None:
    """Host code that raises fails its request alone. With 1000, it raises only when the text is finished."""
    (victim,), run = run_with_bystanders(llm, sabotage=break_text(at))
    assert (victim.finish_reason, str(victim.error), run.outcomes) == ("error", "broken detokenizer", expected)


@pytest.mark.parametrize("at", [1, 2, 7, 1000], ids="token {}".format)
def test_host_code_that_raises_frees_the_blocks(llm: LLM, at: int) -> None:
    run_with_bystanders(llm, sabotage=break_text(at))
    assert_all_blocks_free(llm)


def test_abort_of_a_request_whose_host_code_raises_frees_the_blocks(llm: LLM) -> None:
    def sabotage(samples: list[Request]) -> None:
        break_text(1000)(samples)
        llm.engine.abort(samples[0].request_id)

    run_with_bystanders(llm, steps=3, sabotage=sabotage)
    assert_all_blocks_free(llm)


# -- ends inside and across drafts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim_alone(target: Path) -> Outcome:
    return alone(target, [VICTIM])[0]


@pytest.fixture
def answers(victim_alone: Outcome, expected: list[Outcome]) -> list[list[int]]:
    return right_answers([victim_alone, *expected])


@pytest.mark.parametrize("boundary", ["between two steps", "inside a draft", "between draft and bonus"])
def test_a_stop_string_across_tokens_ends_the_text_where_plain_decoding_does(
    target: Path, victim_alone: Outcome, expected: list[Outcome], boundary: str
) -> None:
    """A stop string across tokens ends the text where plain decoding does, wherever a step ends.

    The oracle never lies, so the first token comes with the prompt, and each step after it emits K + 1 tokens.
    """
    second = {"between two steps": K + 2, "inside a draft": K + 3, "between draft and bonus": 2 * K + 2}[boundary]
    ids = victim_alone.token_ids
    stop = PIECES[ids[second - 1]][-1] + PIECES[ids[second]][0]
    text = "".join(PIECES[token] for token in ids[: second + 1])
    assert text.index(stop) + len(stop) > len(text) - len(PIECES[ids[second]]), "it occurs earlier; use another seed"
    victim = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, stop=stop))
    answers = right_answers([victim_alone, *expected])
    llm = user_llm(target, LyingOracle(answers, lie=0.0))
    (request,), run = run_with_bystanders(llm, victim)
    assert Outcome.of(request) == Outcome(ids[: second + 1], text[: text.index(stop)], "stop", stop)
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("max_tokens", range(1, 2 * K + 4))
def test_max_tokens_anywhere_in_a_step(
    target: Path, answers: list[list[int]], victim_alone: Outcome, expected: list[Outcome], max_tokens: int
) -> None:
    victim = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, max_tokens=max_tokens))
    llm = user_llm(target, LyingOracle(answers, lie=0.0))
    (request,), run = run_with_bystanders(llm, victim)
    assert (request.output_ids, request.finish_reason) == (victim_alone.token_ids[:max_tokens], "length")
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


def test_max_seq_len_inside_a_draft(target: Path, answers: list[list[int]], victim_alone: Outcome) -> None:
    drafter = LyingOracle(answers, lie=0.0)
    speculation = {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": K}
    llm = LLM(target, speculation, max_seq_len=len(VICTIM.prompt) + K + 3)
    (output,) = llm.generate(VICTIM.prompt, dataclasses.replace(VICTIM.params, max_tokens=None))
    assert output.outputs[0].token_ids == victim_alone.token_ids[: K + 3]


def test_nan_after_the_end_of_a_request_is_not_its_error(target: Path) -> None:
    """NaN after the end of a request is not its error.

    A draft may run past the stop, where plain decoding would not have computed any rows.
    """
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(target) as plain:
        (outcome,) = run_alone(plain.engine, [Case([3, 4, 5], params)])
    stop = outcome.token_ids[2]
    llm = user_llm(target, LyingOracle([[3, 4, 5, *outcome.token_ids]], lie=0.0))
    poison_embedding(llm, stop)  # the row of the stop token, and all after it
    (request,) = run_together(
        llm.engine, [Case([3, 4, 5], dataclasses.replace(params, stop_token_ids=[stop]))]
    ).requests
    assert (request.finish_reason, request.error) == ("stop", None)


# -- cache pressure and aborts -------------------------------------------------------------------------------------


def test_pressure_on_the_cache_changes_no_output(target: Path, draft: Path, expected: list[Outcome]) -> None:
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    llm = LLM(target, speculation, **{**LIMITS, "num_kv_blocks": 30})
    _, run = run_with_bystanders(llm)
    assert llm.engine.loop.scheduler.num_preemptions > 0
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_the_blocks_at_once(llm: LLM, steps: int) -> None:
    (victim,) = llm.engine.add_request(VICTIM.prompt * 8, VICTIM.params)  # prefilled in two steps
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(victim.request_id)
    assert victim.finish_reason == "abort"
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_does_not_touch_the_others(llm: LLM, expected: list[Outcome], steps: int) -> None:
    _, run = run_with_bystanders(llm, steps=steps, sabotage=lambda samples: llm.engine.abort(samples[0].request_id))
    assert run.outcomes == expected


SAMPLES = Case(VICTIM.prompt * 8, dataclasses.replace(VICTIM.params, n=3))  # 72 ids, prefilled in two steps


@pytest.fixture(scope="module")
def samples_alone(target: Path) -> list[Outcome]:
    """The outcome of each sample with its own seed, alone."""
    seeds = [sample_seed(VICTIM.params.seed or 0, i) for i in range(3)]
    with LLM(target) as llm:
        return run_alone(
            llm.engine, [Case(SAMPLES.prompt, dataclasses.replace(VICTIM.params, seed=seed)) for seed in seeds]
        )


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("gone", [0, 1, 2], ids=["leader", "second", "third"])
def test_abort_of_one_sample_leaves_the_other_samples_alone(
    llm: LLM, samples_alone: list[Outcome], steps: int, gone: int
) -> None:
    """An abort of one sample before, during or after prefill of the shared prompt leaves the others alone."""
    samples = llm.engine.add_request(SAMPLES.prompt, SAMPLES.params)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(samples[gone].request_id)
    while llm.engine.has_work:
        llm.engine.step()
    kept = [i for i in range(3) if i != gone]
    assert [Outcome.of(samples[i]) for i in kept] == [samples_alone[i] for i in kept]
    assert_all_blocks_free(llm)


def test_abort_of_all_samples_frees_all_blocks(llm: LLM) -> None:
    case = Case(VICTIM.prompt * 8, dataclasses.replace(VICTIM.params, n=4))

    def sabotage(samples: list[Request]) -> None:
        for sample in samples:
            llm.engine.abort(sample.request_id)

    run_with_bystanders(llm, case, 3, sabotage)
    assert_all_blocks_free(llm)


def test_abort_of_an_unknown_or_finished_request_is_ignored(llm: LLM) -> None:
    (victim,), _ = run_with_bystanders(llm)
    llm.engine.abort(victim.request_id)
    llm.engine.abort(12345)
    assert victim.finish_reason == "length"


def test_a_request_that_is_refused_changes_nothing_for_those_running(llm: LLM, expected: list[Outcome]) -> None:
    def refused(samples: list[Request]) -> None:
        with pytest.raises(RequestError):
            llm.engine.add_request([VOCAB], VICTIM.params)

    _, run = run_with_bystanders(llm, sabotage=refused)
    assert run.outcomes == expected


def test_aborts_at_random_times_under_pressure_leak_nothing(target: Path, draft: Path, expected: list[Outcome]) -> None:
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    llm = LLM(target, speculation, **{**LIMITS, "num_kv_blocks": 30})
    engine = llm.engine
    doomed = [
        s for c in draw_cases(10, seed=4) for s in engine.add_request(c.prompt, dataclasses.replace(c.params, n=2))
    ]
    kept = [engine.add_request(case.prompt, case.params)[0] for case in BYSTANDERS]
    while engine.has_work:
        engine.step()
        if doomed:
            engine.abort(doomed.pop(len(doomed) // 2).request_id)
    assert [Outcome.of(request) for request in kept] == expected
    assert_all_blocks_free(llm)
