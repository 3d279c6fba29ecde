"""LLM's log line of acceptance and throughput: when it comes, that its figures are the engine's, and no text in it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.e2e.tiny import PIECES
from trtspec import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop_token_ids=[3], min_tokens=20)
PROMPTS = ["abcabc", "gefgef", "dd"]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, list[float]]]:
    """The figures of each line by name. Figures by draft position are several."""
    lines = [record.getMessage() for record in caplog.records if record.name == "trtspec.stats"]
    return [
        {found[1]: [float(one) for one in found[2].split() if one != "-"] for found in parts}
        for line in lines
        for parts in [[re.fullmatch(r"([a-z ]+?) ([-\d. e]+)", part) for part in line[7:].split(", ")]]
        if all(parts)
    ]


def test_an_llm_writes_nothing_unless_asked(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(target, NGRAM) as llm:
        assert llm.engine.log is None
        llm.generate(PROMPTS, PARAMS)
    assert not lines_of(caplog)


def test_the_lines_add_up_to_what_the_engine_counts(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lines add up to the engine's counts.

    There is a line for each step. Some steps have no drafts, or end a request inside its accepted drafts.
    """
    caplog.set_level(logging.INFO, "trtspec.stats")
    with LLM(target, NGRAM, disable_log_stats=False, max_batch_size=2) as llm:
        assert llm.engine.log is not None
        assert llm.engine.log.interval == 10.0
        llm.engine.log.interval = 0.0
        llm.generate(PROMPTS, PARAMS)
        metrics = llm.get_metrics()
    lines, stats = lines_of(caplog), metrics.speculation
    assert len(lines) == metrics.steps
    for name, total in {"drafted tokens": stats.num_draft_tokens, "accepted tokens": stats.num_accepted_tokens}.items():
        assert sum(line[name][0] for line in lines if name in line) == total > 0
    drafted = [line for line in lines if "drafted tokens" in line]
    assert 0 < len(drafted) < len(lines)
    for line in drafted:
        rate = line["accepted tokens"][0] / line["drafted tokens"][0]
        assert line["acceptance rate"] == [pytest.approx(rate, abs=1e-4)]
        assert 1 <= line["acceptance length"][0] <= 4
        assert 1 <= len(line["acceptance per position"]) <= 3
    assert {line["running"][0] for line in lines} == {0, 1, 2}
    assert {line["waiting"][0] for line in lines} == {0, 1}
    said = " ".join(record.getMessage() for record in caplog.records if record.name == "trtspec.stats")
    assert not [piece for piece in PIECES if len(piece.strip()) > 1 and re.search(rf"\b{piece}\b", said)]


def test_a_line_comes_once_its_seconds_were_spent_in_steps(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trtspec.stats")
    with LLM(target, NGRAM, disable_log_stats=False) as llm:
        assert llm.engine.log is not None
        llm.generate(PROMPTS, PARAMS)
        assert not lines_of(caplog)  # it was quicker than that
        llm.engine.log.interval = spent = llm.get_metrics().step_time
        llm.generate(PROMPTS, PARAMS)
        first, *_ = lines_of(caplog)
    assert first["seconds"][0] == pytest.approx(spent, rel=0.5)
