"""Nothing is lost: whatever happens to one request, the others' outputs are the same and every block comes back.

A victim is submitted first and sabotaged; bystanders arrive while it runs. What they produce is compared with plain
decoding of each alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
    Run,
    assert_all_blocks_free,
    draw_cases,
    run_alone,
    run_together,
)
from trtspec import LLM, SamplingParams
from trtspec.backends.eager import EagerExecutable
from trtspec.core import DraftRequest, Executable, Proposal, StepInputs, StepOutputs
from trtspec.engine.request import Request
from trtspec.errors import RequestError
from trtspec.sampling_params import sample_seed
from trtspec.text import TextStream

K = 3
POISON = 15  # bystanders never see or draw it
LIMITS: dict[str, Any] = {"max_batch_size": 6, "max_num_tokens": 40, "num_kv_blocks": 60, "block_size": 4}


def _without_poison(case: Case) -> Case:
    """Prompt free of POISON; ids that stop cannot be drawn before min_tokens, so it is not drawn either."""
    prompt = [1 if token == POISON else token for token in case.prompt]
    return Case(
        prompt,
        dataclasses.replace(case.params, stop_token_ids=[POISON], min_tokens=case.params.max_tokens, stop=()),
    )


BYSTANDERS = [_without_poison(case) for case in draw_cases(6, seed=21, most_tokens=16)]
VICTIM = Case(
    [3, 4, 5, 6, 7, POISON, 8, 9, 10], SamplingParams(temperature=1.0, seed=14, max_tokens=20, ignore_eos=True)
)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[Outcome]:
    """What each bystander gives alone."""
    with LLM(target) as llm:
        return run_alone(llm.engine, BYSTANDERS)


@pytest.fixture
def llm(target: Path, draft: Path) -> LLM:
    """Drafts with a model, so that two caches must be kept in order."""
    return LLM(target, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}, **LIMITS)


def user_llm(target: Path, drafter: object) -> LLM:
    return LLM(target, {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": K}, **LIMITS)


def run_beside(
    llm: LLM, victim: Case = VICTIM, steps: int = 0, sabotage: Callable[[list[Request]], None] | None = None
) -> tuple[list[Request], Run]:
    """The victim, a few steps of its own, what befalls it, then the bystanders until all is done."""
    samples = llm.engine.add_request(victim.prompt, victim.params)
    for _ in range(steps):
        llm.engine.step()
    if sabotage is not None:
        sabotage(samples)
    return samples, run_together(llm.engine, BYSTANDERS)


class LaunchFails:
    """The target, failing whenever the poison is among the rows: before it has run, or after it has written KV."""

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
    _, run = run_beside(launch_fails)
    assert run.outcomes == expected


def test_a_request_that_breaks_the_launch_gets_the_exception(launch_fails: LLM) -> None:
    (victim,), _ = run_beside(launch_fails)
    assert (victim.finish_reason, str(victim.error)) == ("error", "poisoned row")


def test_a_request_that_breaks_the_launch_frees_its_blocks(launch_fails: LLM) -> None:
    run_beside(launch_fails)
    assert_all_blocks_free(launch_fails)


def test_every_request_that_breaks_the_launch_fails_however_many(launch_fails: LLM, expected: list[Outcome]) -> None:
    victims = [launch_fails.engine.add_request(VICTIM.prompt, VICTIM.params)[0] for _ in range(3)]
    run = run_together(launch_fails.engine, BYSTANDERS)
    assert ([v.finish_reason for v in victims], run.outcomes) == (["error"] * 3, expected)


def test_samples_of_a_prompt_that_breaks_the_launch_all_fail(launch_fails: LLM) -> None:
    victims = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, n=3))
    samples, _ = run_beside(launch_fails, victims)
    assert [sample.finish_reason for sample in samples] == ["error"] * 3


def poison_embedding(llm: LLM, token: int) -> None:
    """Rows of this token, and those that see them, become NaN."""
    timed: Any = llm.engine.loop.target
    executable: EagerExecutable = timed.inner
    with torch.no_grad():
        executable.step.decoder.embedding.weight[token] = float("nan")


@pytest.fixture
def nan_for_poison(llm: LLM) -> LLM:
    """A request with the poison has NaN in its KV and its logits."""
    poison_embedding(llm, POISON)
    return llm


def test_nan_logits_of_one_request_do_not_reach_the_others(nan_for_poison: LLM, expected: list[Outcome]) -> None:
    """Its blocks, full of NaN, are used again by them."""
    _, run = run_beside(nan_for_poison)
    assert run.outcomes == expected


def test_nan_logits_are_an_error_that_says_so(nan_for_poison: LLM) -> None:
    (victim,), _ = run_beside(nan_for_poison)
    assert victim.finish_reason == "error"
    assert "NaN logits" in str(victim.error)


def test_nan_logits_free_the_blocks(nan_for_poison: LLM) -> None:
    run_beside(nan_for_poison)
    assert_all_blocks_free(nan_for_poison)


class TextFails(TextStream):
    """Host code that raises at its `at`-th token, and again when it is asked to finish."""

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
    """1000: only when the text is finished."""
    (victim,), run = run_beside(llm, sabotage=break_text(at))
    assert (victim.finish_reason, str(victim.error), run.outcomes) == ("error", "broken detokenizer", expected)


@pytest.mark.parametrize("at", [1, 2, 7, 1000], ids="token {}".format)
def test_host_code_that_raises_frees_the_blocks(llm: LLM, at: int) -> None:
    run_beside(llm, sabotage=break_text(at))
    assert_all_blocks_free(llm)


def test_abort_of_a_request_whose_host_code_raises_frees_the_blocks(llm: LLM) -> None:
    def sabotage(samples: list[Request]) -> None:
        break_text(1000)(samples)
        llm.engine.abort(samples[0].request_id)

    run_beside(llm, steps=3, sabotage=sabotage)
    assert_all_blocks_free(llm)


# -- a drafter that fails ------------------------------------------------------------------------------------------


class BadDrafter(LyingOracle):
    """Right answers, spoilt for the victim (request 0) in the way that `spoil` does."""

    def __init__(self, answers: Sequence[Sequence[int]], spoil: Callable[[Proposal, int], Proposal]) -> None:
        super().__init__(answers, lie=0.3)
        self.spoil = spoil

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = super().propose(requests)
        rows = [row for row, request in enumerate(requests) if request.request_id == 0]
        return self.spoil(proposal, rows[0]) if rows else proposal


def _raise(proposal: Proposal, row: int) -> Proposal:
    raise RuntimeError("no idea")


def _set(proposal: Proposal, row: int, token: int) -> Proposal:
    tokens = proposal.draft_tokens.clone()
    tokens[row] = token
    return dataclasses.replace(proposal, draft_tokens=tokens)


def _set_length(proposal: Proposal, row: int, length: int) -> Proposal:
    lengths = proposal.draft_lens.clone()
    lengths[row] = length
    return dataclasses.replace(proposal, draft_lens=lengths)


SPOILT: dict[str, Callable[[Proposal, int], Any]] = {
    "raises": _raise,
    "answers None": lambda proposal, row: None,
    "a row too few": lambda p, row: dataclasses.replace(p, draft_tokens=p.draft_tokens[1:]),
    "a row too many": lambda p, row: dataclasses.replace(p, draft_tokens=torch.cat((p.draft_tokens, p.draft_tokens))),
    "a length too few": lambda p, row: dataclasses.replace(p, draft_lens=p.draft_lens[1:]),
    "one dimension": lambda p, row: dataclasses.replace(p, draft_tokens=p.draft_tokens.flatten()),
    "too long": lambda p, row: _set_length(p, row, K + 1),
    "negative length": lambda p, row: _set_length(p, row, -1),
    "id past the vocabulary": lambda p, row: _set(p, row, VOCAB),
    "negative id": lambda p, row: _set(p, row, -1),
    "float ids": lambda p, row: dataclasses.replace(p, draft_tokens=p.draft_tokens.double()),
    "float lengths": lambda p, row: dataclasses.replace(p, draft_lens=p.draft_lens.double()),
    "too few draft KV lengths": lambda p, row: dataclasses.replace(p, draft_kv_lens=p.draft_lens[1:]),
    "draft KV of tokens that do not exist": lambda p, row: dataclasses.replace(p, draft_kv_lens=p.draft_lens + 10_000),
    "negative draft KV lengths": lambda p, row: dataclasses.replace(p, draft_kv_lens=p.draft_lens - 10_000),
}


@pytest.fixture(scope="module")
def victim_alone(target: Path) -> Outcome:
    with LLM(target) as llm:
        return run_alone(llm.engine, [VICTIM])[0]


@pytest.fixture
def answers(victim_alone: Outcome, expected: list[Outcome]) -> list[list[int]]:
    """Prompt and plain output of the victim (request 0) and the bystanders (1..)."""
    pairs = zip((VICTIM, *BYSTANDERS), (victim_alone, *expected), strict=True)
    return [case.prompt + outcome.token_ids for case, outcome in pairs]


@pytest.mark.parametrize("how", SPOILT)
def test_a_drafter_that_fails_for_one_changes_no_output(
    target: Path, answers: list[list[int]], victim_alone: Outcome, expected: list[Outcome], how: str
) -> None:
    llm = user_llm(target, BadDrafter(answers, SPOILT[how]))
    (victim,), run = run_beside(llm)
    assert [Outcome.of(victim), *run.outcomes] == [victim_alone, *expected]


@pytest.mark.parametrize("how", SPOILT)
def test_a_drafter_that_fails_for_one_still_drafts_for_the_others(
    target: Path, answers: list[list[int]], how: str
) -> None:
    llm = user_llm(target, BadDrafter(answers, SPOILT[how]))
    _, run = run_beside(llm)
    assert run.speculation.num_accepted_tokens > 0


def test_a_drafter_that_failed_is_not_asked_again_for_that_request(target: Path, answers: list[list[int]]) -> None:
    llm = user_llm(target, BadDrafter(answers, _raise))
    (victim,), _ = run_beside(llm)
    assert victim.stats.num_draft_tokens == 0


class ForgetFails(LyingOracle):
    def forget(self, request_id: int) -> None:
        raise RuntimeError("I never forget")


def test_a_drafter_that_cannot_forget_harms_nobody(
    target: Path, answers: list[list[int]], expected: list[Outcome]
) -> None:
    llm = user_llm(target, ForgetFails(answers))
    _, run = run_beside(llm)
    assert run.outcomes == expected


def test_a_draft_model_that_yields_nan_harms_nobody(llm: LLM, expected: list[Outcome], victim_alone: Outcome) -> None:
    drafter: Any = llm.engine.loop.proposer.drafter
    with torch.no_grad():
        drafter.model.inner.step.decoder.embedding.weight[POISON] = float("nan")
    (victim,), run = run_beside(llm)
    assert [Outcome.of(victim), *run.outcomes] == [victim_alone, *expected]


# -- ends inside and across drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", ["between two steps", "inside a draft", "between draft and bonus"])
def test_a_stop_string_across_tokens_ends_the_text_where_plain_decoding_does(
    target: Path, victim_alone: Outcome, expected: list[Outcome], boundary: str
) -> None:
    """An oracle that never lies: the first token comes with the prompt, then K + 1 a step."""
    second = {"between two steps": K + 2, "inside a draft": K + 3, "between draft and bonus": 2 * K + 2}[boundary]
    ids = victim_alone.token_ids
    stop = PIECES[ids[second - 1]][-1] + PIECES[ids[second]][0]
    text = "".join(PIECES[token] for token in ids[: second + 1])
    assert text.index(stop) + len(stop) > len(text) - len(PIECES[ids[second]]), "it occurs earlier; use another seed"
    victim = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, stop=stop))
    answers = [c.prompt + o.token_ids for c, o in zip((VICTIM, *BYSTANDERS), (victim_alone, *expected), strict=True)]
    llm = user_llm(target, LyingOracle(answers, lie=0.0))
    (request,), run = run_beside(llm, victim)
    assert Outcome.of(request) == Outcome(ids[: second + 1], text[: text.index(stop)], "stop", stop)
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("max_tokens", range(1, 2 * K + 4))
def test_max_tokens_anywhere_in_a_step(
    target: Path, answers: list[list[int]], victim_alone: Outcome, expected: list[Outcome], max_tokens: int
) -> None:
    victim = Case(VICTIM.prompt, dataclasses.replace(VICTIM.params, max_tokens=max_tokens))
    llm = user_llm(target, LyingOracle(answers, lie=0.0))
    (request,), run = run_beside(llm, victim)
    assert (request.output_ids, request.finish_reason) == (victim_alone.token_ids[:max_tokens], "length")
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


def test_max_seq_len_inside_a_draft(target: Path, answers: list[list[int]], victim_alone: Outcome) -> None:
    drafter = LyingOracle(answers, lie=0.0)
    speculation = {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": K}
    llm = LLM(target, speculation, max_seq_len=len(VICTIM.prompt) + K + 3)
    (output,) = llm.generate(VICTIM.prompt, dataclasses.replace(VICTIM.params, max_tokens=None))
    assert output.outputs[0].token_ids == victim_alone.token_ids[: K + 3]


def test_nan_behind_the_end_of_a_request_is_not_its_error(target: Path) -> None:
    """A draft may run past the stop; plain decoding would never have computed the rows there."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(target) as plain:
        (alone,) = run_alone(plain.engine, [Case([3, 4, 5], params)])
    stop = alone.token_ids[2]
    llm = user_llm(target, LyingOracle([[3, 4, 5, *alone.token_ids]], lie=0.0))
    poison_embedding(llm, stop)  # the row of the stop token, and all behind it
    (request,) = run_together(
        llm.engine, [Case([3, 4, 5], dataclasses.replace(params, stop_token_ids=[stop]))]
    ).requests
    assert (request.finish_reason, request.error) == ("stop", None)


# -- cache pressure and aborts -------------------------------------------------------------------------------------


def test_pressure_on_the_cache_changes_no_output(target: Path, draft: Path, expected: list[Outcome]) -> None:
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    llm = LLM(target, speculation, **{**LIMITS, "num_kv_blocks": 30})
    _, run = run_beside(llm)
    assert llm.engine.loop.scheduler.num_preemptions > 0
    assert run.outcomes == expected
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_the_blocks_at_once(llm: LLM, steps: int) -> None:
    (victim,) = llm.engine.add_request(VICTIM.prompt * 8, VICTIM.params)  # two steps to read the prompt in
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(victim.request_id)
    assert victim.finish_reason == "abort"
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_does_not_touch_the_others(llm: LLM, expected: list[Outcome], steps: int) -> None:
    _, run = run_beside(llm, steps=steps, sabotage=lambda samples: llm.engine.abort(samples[0].request_id))
    assert run.outcomes == expected


SAMPLES = Case(VICTIM.prompt * 8, dataclasses.replace(VICTIM.params, n=3))  # 72 ids: two steps to read them in


@pytest.fixture(scope="module")
def samples_alone(target: Path) -> list[Outcome]:
    """What each of the samples gives with its own seed, alone."""
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
    """Before the shared prompt has been read in, while it is, and afterwards."""
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

    run_beside(llm, case, 3, sabotage)
    assert_all_blocks_free(llm)


def test_abort_of_an_unknown_or_finished_request_is_ignored(llm: LLM) -> None:
    (victim,), _ = run_beside(llm)
    llm.engine.abort(victim.request_id)
    llm.engine.abort(12345)
    assert victim.finish_reason == "length"


def test_a_request_that_is_refused_changes_nothing_for_those_running(llm: LLM, expected: list[Outcome]) -> None:
    def refused(samples: list[Request]) -> None:
        with pytest.raises(RequestError):
            llm.engine.add_request([VOCAB], VICTIM.params)

    _, run = run_beside(llm, sabotage=refused)
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
