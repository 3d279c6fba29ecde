"""The example of a user's own drafter.

It runs as a script, can be given as an object, a class or a path, and changes no output.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import examples.custom_drafter
from examples.custom_drafter import SuccessorDrafter
from tests.e2e.tiny import Case, LyingOracle, assert_all_blocks_free, draw_cases, run_alone, run_together
from trtspec import LLM
from trtspec.errors import ConfigError
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
CASES = draw_cases(20, seed=13)


def speculation(drafter: Any) -> dict[str, Any]:
    return {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "drafter",
    [SuccessorDrafter(), SuccessorDrafter, "examples.custom_drafter:SuccessorDrafter"],
    ids=["object", "class", "path"],
)
def test_it_changes_no_output_and_some_drafts_are_accepted(target: Path, drafter: Any) -> None:
    with LLM(target) as plain:
        expected = run_alone(plain.engine, CASES)
    llm = LLM(target, speculation(drafter), max_batch_size=4, num_kv_blocks=60, block_size=4)
    run = run_together(llm.engine, CASES)
    assert run.outcomes == expected
    assert run.speculation.num_accepted_tokens > 0
    assert_all_blocks_free(llm)


def test_it_learns_from_one_request_for_the_next() -> None:
    drafter = SuccessorDrafter()
    drafter.propose([DraftRequest(0, [1, 2, 3, 4, 5], 1, GREEDY, (), 0)])
    proposal = drafter.propose([DraftRequest(1, [9, 1, 2], 4, GREEDY, (), 0)])
    assert (proposal.draft_tokens.tolist(), proposal.draft_lens.tolist()) == ([[3, 4, 5, 0]], [3])


def test_it_keeps_nothing_per_request_once_that_has_ended(target: Path) -> None:
    drafter = SuccessorDrafter()
    llm = LLM(target, speculation(drafter))
    run_together(llm.engine, [Case([1, 2, 3], case.params) for case in CASES[:5]])
    assert drafter.num_learnt == {}


def test_its_main_shows_that_the_text_is_the_same(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples.custom_drafter.main(str(target), ["abc", "abc"])
    assert capsys.readouterr().out.count("same text") == 2


def test_as_a_script_without_a_model_it_says_how_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["custom_drafter.py"])
    with pytest.raises(SystemExit, match="usage:"):
        runpy.run_path(examples.custom_drafter.__file__, run_name="__main__")


@pytest.mark.parametrize("drafter", [3, "math:pi", LyingOracle.propose], ids=["number", "path", "function"])
def test_what_is_no_drafter_is_refused(target: Path, drafter: Any) -> None:
    with pytest.raises(ConfigError, match="has no propose"):
        LLM(target, speculation(drafter))
