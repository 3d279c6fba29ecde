"""A drafter that fails, in every possible way.

The request that it fails goes on without drafts, with one warning, and to the same output. The other requests keep
their drafts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import VOCAB, LyingOracle, Outcome, assert_all_blocks_free
from tests.e2e.victims import BYSTANDERS, LIMITS, POISON, VICTIM, K, alone, right_answers, run_with_bystanders, user_llm
from trtspec import LLM
from trtspec.core import Proposal
from trtspec.errors import ConfigError, DeviceError, EngineError
from trtspec.protocols import DraftRequest

Spoil = Callable[[Sequence[DraftRequest], Proposal, int], Any]
"""(requests for drafts, right answer, the victim's row) -> wrong answer."""


@pytest.fixture(scope="module")
def expected(target: Path) -> list[Outcome]:
    """The outcomes of the victim and of each bystander alone."""
    return alone(target, [VICTIM, *BYSTANDERS])


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of the engine so far."""
    caplog.set_level(logging.WARNING, logger="trtspec")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("trtspec")]


def outcomes_of(llm: LLM) -> list[Outcome]:
    """Outcomes of the victim and the bystanders, run together. It checks that all blocks are free in the end."""
    (victim,), run = run_with_bystanders(llm)
    assert_all_blocks_free(llm)
    return [Outcome.of(victim), *run.outcomes]


class BadDrafter(LyingOracle):
    """A drafter whose answers are mostly right at first.

    Once the victim (request 0) has a few tokens and other requests run with it, it spoils every answer that includes
    the victim.
    """

    def __init__(self, expected: Sequence[Outcome], spoil: Spoil) -> None:
        super().__init__(right_answers(list(expected)), lie=0.3)
        self.spoil = spoil
        self.began = False
        self.after: set[int] = set()  # requests that got an answer since then

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = super().propose(requests)
        rows = [row for row, request in enumerate(requests) if request.request_id == 0]
        self.began |= bool(rows) and len(requests) > 1 and len(requests[rows[0]].tokens) > len(VICTIM.prompt) + 1
        if self.began and rows:
            answer: Proposal = self.spoil(requests, proposal, rows[0])
            return answer
        if self.began:
            self.after.update(request.request_id for request in requests)
        return proposal


def _raise(questions: Sequence[DraftRequest], proposal: Proposal, row: int) -> Proposal:
    raise RuntimeError("no idea")


def _grow(questions: Any, proposal: Proposal, row: int) -> Proposal:
    questions[row].tokens.append(POISON)
    return proposal


def _reserve(questions: Any, proposal: Proposal, row: int) -> Proposal:
    questions[row].block_table.append(1)
    return proposal


def _sort(questions: Any, proposal: Proposal, row: int) -> Proposal:
    questions.sort(key=len)
    return proposal


def _change(**changes: Callable[[Proposal, int], Any]) -> Spoil:
    def spoil(questions: Sequence[DraftRequest], proposal: Proposal, row: int) -> Proposal:
        return dataclasses.replace(proposal, **{name: change(proposal, row) for name, change in changes.items()})

    return spoil


def _with(values: torch.Tensor, row: int, value: int) -> torch.Tensor:
    values = values.clone()
    values[row] = value
    return values


def _wide(proposal: Proposal, row: int) -> torch.Tensor:
    return torch.cat((proposal.draft_tokens, proposal.draft_tokens, proposal.draft_tokens), 1)


# name -> how the answer is spoilt, and words of the error about it.
SPOILT: dict[str, tuple[Spoil, str]] = {
    "raises": (_raise, "RuntimeError: no idea"),
    "answers None": (lambda *_: None, r"returned a NoneType.*trtspec\.core\.Proposal"),
    "answers a list": (lambda *_: [[1, 2]], "returned a list"),
    "lists for tensors": (_change(draft_tokens=lambda p, row: p.draft_tokens.tolist()), "draft_tokens a list"),
    "a row too few": (_change(draft_tokens=lambda p, row: p.draft_tokens[1:]), r"draft_tokens \[0, \d\] torch.int64"),
    "a row too many": (_change(draft_tokens=lambda p, row: p.draft_tokens.repeat(2, 1)), r"draft_tokens \[2, \d\]"),
    "a length too few": (_change(draft_lens=lambda p, row: p.draft_lens[1:]), r"draft_lens \[0\]"),
    "one dimension": (_change(draft_tokens=lambda p, row: p.draft_tokens.flatten()), r"tensor \[1, K\] of int64"),
    "three dimensions": (_change(draft_tokens=lambda p, row: p.draft_tokens[None]), r"draft_tokens \[1, 1, \d\]"),
    "a number": (_change(draft_lens=lambda p, row: torch.tensor(K)), r"draft_lens \[\] "),
    "longer than its row": (
        _change(draft_lens=lambda p, row: _with(p.draft_lens, row, p.draft_tokens.shape[1] + 1)),
        r"draft_len \d; allowed are 0\.\.\d",
    ),
    "longer than asked for": (
        _change(draft_tokens=_wide, draft_lens=lambda p, row: _with(p.draft_lens, row, 2 * K)),
        rf"draft_len {2 * K}; allowed are 0\.\.\d",
    ),
    "negative length": (_change(draft_lens=lambda p, row: _with(p.draft_lens, row, -1)), "draft_len -1"),
    "id past the vocabulary": (_change(draft_tokens=lambda p, row: _with(p.draft_tokens, row, VOCAB)), "ids are 0..15"),
    "id far past it": (_change(draft_tokens=lambda p, row: _with(p.draft_tokens, row, 2**62)), "token ids are 0..15"),
    "negative id": (_change(draft_tokens=lambda p, row: _with(p.draft_tokens, row, -1)), r"proposed \[-1.*ids are 0"),
    "float ids": (_change(draft_tokens=lambda p, row: p.draft_tokens.double()), "torch.float64.*int64 or int32"),
    "bool ids": (_change(draft_tokens=lambda p, row: p.draft_tokens > 5), "torch.bool"),
    "float lengths": (_change(draft_lens=lambda p, row: p.draft_lens.double()), "draft_lens .*torch.float64"),
    "nan lengths": (_change(draft_lens=lambda p, row: p.draft_lens * float("nan")), "torch.float32"),
    "too few draft KV lengths": (_change(draft_kv_lens=lambda p, row: p.draft_lens[1:]), r"draft_kv_lens \[0\]"),
    "too few scores": (_change(draft_scores=lambda p, row: p.draft_lens.float()), r"draft_scores \[1\] torch.float32"),
    "whole scores": (_change(draft_scores=lambda p, row: p.draft_tokens), "draft_scores .*int64; want a floating-p"),
    "a list of scores": (_change(draft_scores=lambda p, row: [0.5]), "draft_scores a list; want a floating-p"),
    "float draft KV lengths": (_change(draft_kv_lens=lambda p, row: p.draft_lens.float()), "draft_kv_lens .*float32"),
    "draft KV of tokens that do not exist": (
        _change(draft_kv_lens=lambda p, row: p.draft_lens + 10_000),
        r"draft_kv_len 1000\d; allowed are 0\.\.\d+",
    ),
    "negative draft KV lengths": (_change(draft_kv_lens=lambda p, row: p.draft_lens - 10_000), "draft_kv_len -"),
    "grows the tokens": (_grow, "has no attribute 'append'"),
    "grows the block table": (_reserve, "has no attribute 'append'"),
    "sorts the questions": (_sort, "has no attribute 'sort'"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_drafter_that_fails_one_of_several(
    target: Path, expected: list[Outcome], warned: Callable[[], list[str]], how: str
) -> None:
    """A drafter fails the victim from the middle of its output on, while others run. All outputs stay the same.

    The warning states the reason once, and the drafter is not called for the victim again.
    """
    spoil, words = SPOILT[how]
    drafter = BadDrafter(expected, spoil)
    llm = user_llm(target, drafter)
    (victim,), run = run_with_bystanders(llm)
    assert [Outcome.of(victim), *run.outcomes] == expected
    assert_all_blocks_free(llm)

    (warning,) = warned()
    assert re.match(r"request 0 goes on without drafts, its output is not affected: the drafter failed \(", warning)
    assert re.search(words, warning)
    assert re.search(words.removeprefix("RuntimeError: "), str(victim.drafter_error))
    assert 0 < victim.stats.num_draft_tokens < K * victim.stats.steps
    assert llm.engine.stats.drafter_failures == 2  # with the others, and alone

    assert [request.drafter_error for request in run.requests] == [None] * len(BYSTANDERS)
    assert drafter.after == {request.request_id for request in run.requests}
    assert run.speculation.num_accepted_tokens > 0


HARMLESS: dict[str, Spoil] = {
    "int32 ids": _change(draft_tokens=lambda p, row: p.draft_tokens.int()),
    "rows with more than is meant": _change(draft_tokens=_wide),
    "no columns": _change(
        draft_tokens=lambda p, row: p.draft_tokens[:, :0], draft_lens=lambda p, row: p.draft_lens.fill_(0)
    ),
    "wrong ids that are not meant": _change(
        draft_tokens=lambda p, row: p.draft_tokens.fill_(-1), draft_lens=lambda p, row: p.draft_lens.fill_(0)
    ),
    "probabilities that are none": _change(draft_probs=lambda p, row: torch.full((1, 2), float("nan"))),
}


@pytest.mark.parametrize("how", HARMLESS)
def test_what_is_no_fault(target: Path, expected: list[Outcome], warned: Callable[[], list[str]], how: str) -> None:
    """Strict acceptance reads the drafts within draft_lens and nothing else, so these oddities are no fault."""
    llm = user_llm(target, BadDrafter(expected, HARMLESS[how]))
    assert outcomes_of(llm) == expected
    assert (warned(), llm.engine.stats.drafter_failures) == ([], 0)


class Sometimes(LyingOracle):
    """A drafter that raises in two calls of five."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        if self.rng.random() < 0.4:
            raise RuntimeError("not now")
        return super().propose(requests)


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_fails_now_and_then(
    target: Path, expected: list[Outcome], warned: Callable[[], list[str]], seed: int
) -> None:
    """There is one warning for each request that the drafter failed alone. The others still have drafts."""
    llm = user_llm(target, Sometimes(right_answers(expected), seed=seed))
    (victim,), run = run_with_bystanders(llm)
    assert [Outcome.of(victim), *run.outcomes] == expected
    assert_all_blocks_free(llm)
    failed = {request.request_id for request in (victim, *run.requests) if request.drafter_error is not None}
    named = [int(match[1]) for line in warned() if (match := re.match(r"request (\d+) goes on without drafts", line))]
    assert 0 < len(failed) <= len(BYSTANDERS)
    assert sorted(named) == sorted(failed)
    assert run.speculation.num_accepted_tokens > 0


class OneAtATime(LyingOracle):
    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        (request,) = requests
        return super().propose([request])


def test_a_drafter_that_fails_several_at_once_and_none_alone(
    target: Path, expected: list[Outcome], warned: Callable[[], list[str]]
) -> None:
    """All requests keep their drafts, because none of them fails alone. One warning says what that costs."""
    llm = user_llm(target, OneAtATime(right_answers(expected)))
    (victim,), run = run_with_bystanders(llm)
    assert [Outcome.of(victim), *run.outcomes] == expected
    assert [request.drafter_error for request in (victim, *run.requests)] == [None] * len(expected)
    (warning,) = warned()
    assert re.search(r"ValueError: .*when asked for \d requests at once, and not for each alone", warning)
    assert llm.engine.stats.drafter_failures > 1
    assert run.speculation.num_accepted_tokens > 0


class Never(LyingOracle):
    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        raise RuntimeError("never")


def test_a_drafter_that_always_fails(target: Path, expected: list[Outcome], warned: Callable[[], list[str]]) -> None:
    """A drafter that always fails means plain decoding, with a warning for each request."""
    llm = user_llm(target, Never([]))
    assert outcomes_of(llm) == expected
    assert sorted(int(re.findall(r"\d+", line)[0]) for line in warned()) == list(range(len(expected)))
    assert llm.engine.stats.speculation.num_draft_tokens == 0


class OnALostDevice(LyingOracle):
    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        raise DeviceError("the GPU is gone")


def test_nobody_is_blamed_for_a_lost_device(target: Path, warned: Callable[[], list[str]]) -> None:
    """A lost device stops the engine, as nothing can run on it. The drafter is not called for each request alone."""
    with user_llm(target, OnALostDevice([])) as llm:
        running = []
        for case in (VICTIM, *BYSTANDERS):
            with suppress(EngineError):  # the first one may stop it quickly
                running.append(llm.generate_async(case.prompt, case.params))
        assert running
        for generation in running:
            with pytest.raises(EngineError, match="the GPU is gone"):
                generation.result(timeout=60)
    assert not any("without drafts" in line for line in warned())


class ForgetFails(LyingOracle):
    def forget(self, request_id: int) -> None:
        raise RuntimeError("I never forget")


def test_a_drafter_that_cannot_forget_harms_nobody(
    target: Path, expected: list[Outcome], warned: Callable[[], list[str]]
) -> None:
    llm = user_llm(target, ForgetFails(right_answers(expected)))
    assert outcomes_of(llm) == expected
    lines = [f"failed to forget request {number}, and may keep its memory" for number in range(len(expected))]
    assert sorted(line[len("the drafter ") :].partition(" (")[0] for line in warned()) == lines


def test_who_waits_for_an_output_sees_that_drafts_were_lost(
    target: Path, expected: list[Outcome], warned: Callable[[], list[str]]
) -> None:
    """A caller with asyncio sees that drafts were lost: the output has the reason, and a metric counts the failure."""

    async def everybody(llm: LLM) -> list[Any]:
        cases = (VICTIM, *BYSTANDERS)
        return await asyncio.gather(*(llm.generate_async(case.prompt, case.params) for case in cases))

    with user_llm(target, BadDrafter(expected, _raise)) as llm:
        outputs = [output.outputs[0] for output in asyncio.run(everybody(llm))]
        assert [output.token_ids for output in outputs] == [outcome.token_ids for outcome in expected]
        assert [output.text for output in outputs] == [outcome.text for outcome in expected]
        assert [output.drafter_error for output in outputs] == ["RuntimeError: no idea"] + [None] * len(BYSTANDERS)
        assert [output.error for output in outputs] == [None] * len(outputs)
        assert len(warned()) == 1
        assert llm.get_metrics().drafter_failures == 2
        assert_all_blocks_free(llm)


def test_no_batch_goes_on_unseen_next_to_a_users_drafter(target: Path, expected: list[Outcome]) -> None:
    """With a user's drafter, every step reads its requests: the fast path (engine.steady) calls no drafter."""
    llm = user_llm(target, LyingOracle(right_answers(expected), lie=0.0))
    (victim,) = llm.engine.add_request(VICTIM.prompt, VICTIM.params)
    while llm.engine.has_work:
        llm.engine.step()
        assert llm.engine.loop.steady is None
    assert Outcome.of(victim) == expected[0]


def test_a_draft_model_that_yields_nan_harms_nobody(target: Path, draft: Path, expected: list[Outcome]) -> None:
    llm = LLM(target, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}, **LIMITS)
    drafter: Any = llm.engine.loop.proposer.drafter
    with torch.no_grad():
        drafter.model.inner.step.decoder.embedding.weight[POISON] = float("nan")
    assert outcomes_of(llm) == expected


class CannotBeMade:
    def __init__(self) -> None:
        raise OSError("no such table")


class WantsArguments(LyingOracle):
    """A drafter whose class cannot be called without arguments."""


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (CannotBeMade, "OSError: no such table"),
        (WantsArguments, "missing 1 required positional argument: 'answers'"),
        (f"{__name__}:CannotBeMade", "OSError: no such table"),
        (f"{__name__}:Nobody", f"'{__name__}:Nobody' cannot be loaded"),
        ("no.such.module:Drafter", "No module named 'no'"),
        ("no path", 'give "package.module:Class"'),
        ("half_written:Drafter", "cannot be made .SyntaxError: "),
    ],
)
def test_a_drafter_that_cannot_be_made(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: Any, words: str
) -> None:
    (tmp_path / "half_written.py").write_text("class Drafter:\n    def")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        user_llm(target, drafter)
