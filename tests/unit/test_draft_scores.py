"""What scores of drafts say of their chances."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from tests.unit.test_draft_length import REAL, K, simulate_scored
from trtspec.engine import draft_length
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.draft_scores import BINS, HIGHEST, OFFERS, PARTS, DraftScores, Level, levels_of


def test_a_score_is_taken_for_the_chance_until_drafts_were_verified() -> None:
    scores = DraftScores()
    assert [scores.chance(score) for score in (0.0, 0.25, 1.0)] == [0.0, 0.25, 1.0]


def test_chances_are_the_shares_that_were_accepted() -> None:
    """Draft layers that are too sure: half as many drafts are accepted as they say."""
    scores, rng = DraftScores(), random.Random(1)
    for _ in range(3000):
        score = rng.random()
        scores.observe(score, rng.random() < score / 2)
    for at in range(BINS):
        middle = (at + 0.5) / BINS
        # 200 counts at most: a standard deviation of 0.035, and of 0.03 for scores within a bin
        assert scores.chance(middle) == pytest.approx(middle / 2, abs=0.15)


@pytest.mark.parametrize("score", [math.nan, math.inf, -1.0, 1.5])
def test_what_is_no_probability_counts_as_none(score: float) -> None:
    scores = DraftScores()
    assert scores.chance(score) == 0.0
    scores.observe(score, accepted=False)
    assert scores.chance(0.95) == 0.95, "the likeliest drafts are not blamed"


def test_the_spread_is_that_of_the_latest_offers() -> None:
    scores, rng = DraftScores(), random.Random(2)
    for _ in range(OFFERS - 1):
        scores.see_offer([0.5, 0.5])
    assert scores.spread == []
    scores.see_offer([0.5, 0.5])
    assert scores.spread == [(1.0,) * PARTS] * 2, "all are equal"
    for _ in range(25 * OFFERS):
        first = rng.random()
        scores.see_offer([first, first / 2])
    for ratios in scores.spread:
        assert statistics.mean(ratios) == pytest.approx(1.0)
        assert list(ratios) == sorted(ratios)
        assert ratios[0] < 0.4
        assert ratios[-1] > 1.6
    for _ in range(OFFERS):
        scores.see_offer([0.0])
    assert scores.spread == [(1.0,) * PARTS]
    assert HIGHEST < 1


@pytest.mark.parametrize("batch", [1, 8])
def test_what_cannot_be_best_is_left_out(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums of chances that bound nothing, every number of drafts and every draft is looked at."""

    def unbounded(*asked: Any) -> tuple[list[Level], list[float]]:
        levels, sums = levels_of(*asked)
        return levels, [math.inf] * len(sums)

    chooser = DraftLength(REAL, K)
    chooser.trace = []
    simulate_scored(chooser, batch, knows=True)
    assert len({answer for call, _, answer in chooser.trace if call == "make"}) > 1
    monkeypatch.setattr(draft_length, "levels_of", unbounded)
    thorough = DraftLength(REAL, K)
    for call, asked, answer in chooser.trace:
        assert getattr(thorough, call)(*asked) == answer
