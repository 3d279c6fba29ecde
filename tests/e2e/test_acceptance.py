"""Number of tokens per step: with drafts that are never right, with forced acceptance, and with the target as draft."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import VOCAB, Case, LyingOracle, Run, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.verify.strict import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR

K = 3
MAX_TOKENS = 1 + 6 * (K + 1)  # one from the prompt's step, then whole steps
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.8},
)
CASES = [
    Case(
        [1 + (i * j) % (VOCAB - 1) for j in range(1, 2 + 5 * i)],
        SamplingParams(**sampling, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    for i, sampling in enumerate(SAMPLINGS)
]


@pytest.fixture(scope="module")
def answers(target: Path) -> list[list[int]]:
    """Prompt and plain output of every case."""
    with LLM(target) as llm:
        return [case.prompt + o.token_ids for case, o in zip(CASES, run_alone(llm.engine, CASES), strict=True)]


def run(target: Path, speculation: dict[str, Any], **options: Any) -> Run:
    with LLM(target, {"num_speculative_tokens": K, **speculation}, **options) as llm:
        return run_together(llm.engine, CASES)


def run_oracle(target: Path, answers: Sequence[Sequence[int]], lie: float, **options: Any) -> Run:
    return run(target, {"method": "custom_class", "drafter": LyingOracle(answers, lie)}, **options)


def generation_steps(run: Run) -> list[tuple[int, int]]:
    """(tokens, drafts offered) of every generation step of every request."""
    return [(len(e.tokens), e.draft_len) for step in run.steps for e in step if not e.is_context]


def whole_steps(run: Run) -> list[int]:
    """Number of tokens of each generation step that offered all K drafts.

    Only steps just before max_tokens offer fewer.
    """
    whole = [tokens for tokens, drafts in generation_steps(run) if drafts == K]
    assert len(whole) >= len(generation_steps(run)) - len(CASES) * K
    return whole


def test_a_draft_that_never_agrees_gives_one_token_per_step(target: Path, answers: list[list[int]]) -> None:
    steps = generation_steps(run_oracle(target, answers, lie=1.0))
    assert [tokens for tokens, _ in steps] == [1] * (len(CASES) * (MAX_TOKENS - 1))


def test_a_draft_that_never_agrees_has_acceptance_length_one(target: Path, answers: list[list[int]]) -> None:
    stats = run_oracle(target, answers, lie=1.0).speculation
    assert (stats.acceptance_length, stats.acceptance_per_position) == (1.0, [0.0] * K)


@pytest.mark.parametrize("forced", [1, 2, 3, 7])
def test_the_environment_forces_that_many_accepted_drafts(
    target: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, forced: int
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, str(forced))
    assert set(whole_steps(run_oracle(target, answers, lie=1.0))) == {min(forced + 1, K + 1)}


@pytest.mark.parametrize("forced", [0, 1, 2, 3, 7])
def test_the_field_forces_that_many_accepted_drafts(target: Path, answers: list[list[int]], forced: int) -> None:
    """Any number can be forced, 0 included, whatever the drafts are. Here they are always right."""
    run = run_oracle(target, answers, lie=0.0, force_num_accepted_tokens=forced)
    assert set(whole_steps(run)) == {min(forced + 1, K + 1)}


def test_the_field_wins_over_the_environment(
    target: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "3")
    assert set(whole_steps(run_oracle(target, answers, lie=0.0, force_num_accepted_tokens=1))) == {2}


def test_fewer_drafts_than_forced_are_all_kept(target: Path, answers: list[list[int]]) -> None:
    steps = generation_steps(run_oracle(target, answers, lie=1.0, force_num_accepted_tokens=2))
    assert all(tokens == min(2, drafts) + 1 for tokens, drafts in steps)


@pytest.mark.parametrize("text", ["0", "", "three", "-1", "1.5"])
def test_zero_and_junk_in_the_environment_force_nothing(
    target: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, text)
    run = run_oracle(target, answers, lie=0.5)
    assert [c.prompt + o.token_ids for c, o in zip(CASES, run.outcomes, strict=True)] == answers


@pytest.mark.parametrize("text", ["three", "-1", "1.5"])
def test_junk_in_the_environment_is_warned_about(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, text)
    with caplog.at_level(logging.WARNING):
        LLM(target)
    assert f"{FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR}={text!r}" in caplog.text


def test_zero_in_the_environment_is_not_warned_about(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "0")
    with caplog.at_level(logging.WARNING):
        LLM(target)
    assert FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR not in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_that_is_the_target_is_always_right(target: Path, dtype: str) -> None:
    """Draft and target sample with the same noise, greedy and with filters, so every step emits K + 1 tokens."""
    run_ = run(
        target, {"method": "draft_model", "model": str(target)}, dtype=dtype, max_num_tokens=40, max_batch_size=8
    )
    assert [tokens for tokens, _ in generation_steps(run_)] == [K + 1] * (len(CASES) * (MAX_TOKENS - 1) // (K + 1))


def test_an_arg_max_draft_of_the_target_itself_is_not_always_right_for_sampled_requests(target: Path) -> None:
    """draft_sample_method="greedy" breaks the coupling of draft and target, so the test above is not trivially true."""
    run_ = run(target, {"method": "draft_model", "model": str(target), "draft_sample_method": "greedy"})
    sampled = [request.stats.acceptance_length for request in run_.requests if not request.sampling.greedy]
    assert max(sampled) < K + 1
