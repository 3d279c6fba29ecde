"""Numbers of drafts that are looked up: a launch makes none, so `verify` alone decides, and `asks` before it."""

from __future__ import annotations

import random

import pytest

from trtspec.engine.draft_chances import Offer, Outcome
from trtspec.engine.draft_length import LOOK_EVERY, DraftLength
from trtspec.engine.step_costs import Cell, StepCosts

K = 5


@pytest.mark.parametrize("found", [1.0, 0.1], ids=["always", "seldom"])
def test_looked_up_drafts_rest_and_come_back(found: float) -> None:
    """A launch makes none, so only `verify` decides. An attempt lasts until drafts were found."""
    rng = random.Random(0)
    table = StepCosts([Cell(0, batch, n, 8.0 + 1.0 * n * batch) for batch in (1, 8) for n in range(K + 1)])
    chooser = DraftLength(table, K)
    shares = []
    for chance in (0, 1):
        verified = offers = 0
        for step in range(800):
            assert chooser.make([(0, K)], 1) == 0
            drafts = K if rng.random() < found else 0
            (length,) = chooser.verify([Offer(0, drafts)], 1)
            chooser.observe([Outcome(0, length, length * chance)])
            if step >= 400:
                verified, offers = verified + (length > 0), offers + (drafts > 0)
        shares.append(verified / offers)
    assert shares[0] < (0.1 if found == 1 else 0.7)
    assert shares[1] == 1


@pytest.mark.parametrize("row", [1.0, 10.1], ids=["rests", "never pays"])
def test_drafts_are_not_looked_up_where_none_would_be_verified(row: float) -> None:
    """The same drafts are verified if all are looked up. Texts are shown now and then all the same."""
    table = StepCosts([Cell(0, batch, n, 10.0 + row * n * batch) for batch in (1, 8) for n in range(K + 1)])
    always, seldom = DraftLength(table, K), DraftLength(table, K)
    rng, asked = random.Random(0), []
    for step in range(800):
        asked.append([i for i in (0, 1) if seldom.asks(i, 2)])
        verified = []
        for chooser, ids in ((always, [0, 1]), (seldom, asked[-1])):
            lengths = chooser.verify([Offer(i, K) for i in ids], 2)
            verified.append([(i, length) for i, length in zip(ids, lengths, strict=True) if length])
        assert verified[0] == verified[1]
        chance = 0.9 if 400 <= step < 600 else 0.05
        outcomes = [
            Outcome(i, length, next(j for j in range(K + 1) if j == length or rng.random() > chance))
            for i, length in verified[0]
        ]
        for chooser in (always, seldom):
            chooser.observe(outcomes)
            assert chooser.make([(0, K), (1, K)], 2) == 0
    assert all([0, 1] in asked[at : at + LOOK_EVERY] for at in range(0, 800, LOOK_EVERY))
    assert asked[100:400].count([]) > 225
    assert asked[450:600].count([0, 1]) > 135 or row > 10


def test_drafts_are_looked_up_for_a_step_that_is_tried() -> None:
    class Trying(StepCosts):
        def tries(self, batch: int) -> bool | None:
            return kind

    chooser, kind = DraftLength(Trying([Cell(0, 1, n, 10 + 10.1 * n) for n in range(K + 1)]), K), None
    chooser.make([(0, K)], 1)
    assert not chooser.asks(0, 1)
    kind = False
    assert chooser.asks(0, 1)


def test_looked_up_drafts_that_can_never_pay_are_not_verified() -> None:
    table = StepCosts([Cell(0, 1, n, 10 + 10.1 * n) for n in range(K + 1)])
    chooser = DraftLength(table, K)
    for _ in range(50):
        chooser.make([(0, K)], 1)
        assert chooser.verify([Offer(0, K)], 1) == [0]
