"""Measured times of steps may be wrong: what steps really take corrects them, and says nothing where they are right."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable

import pytest

from tests.unit.test_draft_length import REAL, K, Phase, simulate
from trtspec.engine import observed_costs
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.observed_costs import ObservedCosts
from trtspec.engine.step_costs import Cell, StepCosts
from trtspec.errors import CheckpointError


def disturbed(factor: float) -> list[Cell]:
    """Cells of REAL in which drafts cost `factor` times as much as they do."""
    plain = {cell.batch: cell.seconds for cell in REAL.cells if not cell.made and not cell.verified}
    return [
        Cell(cell.made, cell.batch, cell.verified, plain[cell.batch] + factor * (cell.seconds - plain[cell.batch]))
        for cell in REAL.cells
    ]


STEPS = 400
"""In each phase."""


def phases() -> list[Phase]:
    fixed = [(1, 0.9), (1, 0.3), (8, 0.9), (8, 0.7), (8, 0.5), (8, 0.3), (4, 0.5), (1, 0.6), (1, 0.1)]
    return [Phase(batch, lambda request, chance=chance: chance, steps=STEPS) for batch, chance in fixed]  # type: ignore[misc]


def noisy(slow: Callable[[int], float] = lambda number: 1.0) -> Callable[[int, float], float]:
    """A clock on which steps take up to a few times 8 % longer. slow: factor on the time of each step."""
    rng = random.Random(1)
    return lambda number, took: took * slow(number) * (1 + 0.08 * abs(rng.gauss(0, 1)))


@functools.cache
def right_rates(seed: int) -> list[float]:
    """Tokens per second in each phase with the right times and no clock."""
    return [phase.rate for phase in simulate(DraftLength(REAL, K), phases(), REAL, seed)]


def rates(costs: StepCosts, clock: Callable[[int, float], float] | None) -> list[float]:
    """Tokens per second in each phase, over those with the right times and no clock. Means of two runs."""
    runs = []
    for seed in range(2):
        found = simulate(DraftLength(costs, K), phases(), REAL, seed, clock)
        runs.append([phase.rate / right for phase, right in zip(found, right_rates(seed), strict=True)])
    return [statistics.mean(column) for column in zip(*runs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.2, 2.5, *(pytest.param(one, marks=pytest.mark.long) for one in (0.5, 1.5))])
def test_wrong_times_are_corrected(factor: float) -> None:
    """Drafts that seem too cheap are used too much, and too little where they seem too dear."""
    wrong, corrected = rates(StepCosts(disturbed(factor)), None), rates(ObservedCosts(disturbed(factor)), noisy())
    assert min(wrong) < 0.95, "else there is nothing to correct"
    assert min(corrected) > 0.9
    assert 1 - statistics.mean(corrected) < 0.4 * (1 - statistics.mean(wrong))


@pytest.mark.slow
@pytest.mark.parametrize(
    "slow",
    [
        lambda number: 1.0,
        lambda number: 1.5 if STEPS // 4 < number % STEPS < 3 * STEPS // 4 else 1.0,  # of each phase
        lambda number: 6.0 if number % 40 == 0 else 1.0,
    ],
)
def test_right_times_stay_as_they_are(slow: Callable[[int], float]) -> None:
    """Whatever slows all steps down, and whatever disturbs some, costs little."""
    found = rates(ObservedCosts(REAL.cells), noisy(slow))
    assert min(found) > 0.94
    assert statistics.mean(found) > 0.985


def test_the_factor_is_on_what_drafts_add() -> None:
    costs = ObservedCosts(REAL.cells)
    for _ in range(20):
        for made, verified in ((0, 0), (3, 24), (3, 24)):
            plain, measured = REAL.curve(0, 8, K)[0], REAL.curve(made, 8, K)[verified]
            costs.observe(made, 8, K, verified, 7 * (plain + 1.6 * (measured - plain)))  # a slower machine, too
    plain = REAL.curve(0, 8, K)[0]
    assert costs.curve(0, 8, K)[0] == plain
    for made in (1, 5):
        added = [seconds - plain for seconds in REAL.curve(made, 8, K)]
        assert [seconds - plain for seconds in costs.curve(made, 8, K)] == pytest.approx(
            [1.6 * seconds for seconds in added], rel=0.1
        )
    assert costs.curve(3, 1, K) == REAL.curve(3, 1, K), "another batch size has a factor of its own"


def test_each_kind_of_step_is_tried_now_and_then() -> None:
    """Plain steps where drafts always pay, and drafts where they never seem to, less often each time."""
    always, never = (Phase(1, lambda request, chance=chance: chance, steps=3000) for chance in (0.95, 0.0))  # type: ignore[misc]
    simulate(DraftLength(ObservedCosts(REAL.cells), K), [always], REAL, clock=noisy())
    assert 9 <= always.made[0] <= 30
    dear = ObservedCosts(disturbed(40.0))
    simulate(DraftLength(dear, K), [never], REAL, clock=noisy())
    assert 2 <= never.steps - never.made[0] <= 60
    simulate(DraftLength(StepCosts(disturbed(40.0)), K), [again := Phase(1, lambda request: 0.0, steps=3000)], REAL)
    assert again.made == {0: 3000}, "without a clock, nothing is tried that could not pay"


def test_a_try_ends_though_no_step_is_timed() -> None:
    """Steps with context rows are not timed. While prompts come one after the other, plain steps must not go on."""
    chooser = DraftLength(ObservedCosts(REAL.cells), K)
    simulate(chooser, [Phase(1, lambda request: 0.95, steps=observed_costs.GAPS[True] + 2)], REAL, clock=noisy())
    assert chooser.costs.tries(1)
    made = [chooser.make([(0, K)], 1) for _ in range(observed_costs.ATTEMPTS + 5)]
    assert made[0] == 0
    assert min(made[observed_costs.ATTEMPTS :]) > 0


def test_the_first_drafts_after_a_plain_step_do_not_count() -> None:
    """A draft model then reads what it has missed."""
    costs = ObservedCosts(REAL.cells)
    for _ in range(100):
        costs.observe(0, 8, K, 0, REAL.curve(0, 8, K)[0])
        assert not costs.observe(3, 8, K, 24, 9 * REAL.curve(3, 8, K)[24])
    for _ in range(9):
        costs.observe(3, 8, K, 24, 9 * REAL.curve(3, 8, K)[24])
    assert costs.curve(3, 8, K)[24] > 2 * REAL.curve(3, 8, K)[24]


def test_a_trace_with_times_gives_the_same_decisions() -> None:
    first, second = (DraftLength(ObservedCosts(disturbed(0.2)), K) for _ in range(2))
    first.trace = []
    simulate(first, phases(), REAL, clock=noisy())
    assert any(call == "time" for call, _, _ in first.trace)
    for call, asked, answer in first.trace:
        assert getattr(second, call)(*asked) == answer


def test_an_incomplete_table_is_refused() -> None:
    """Else a batch would ask for a size that was not measured with its number of drafts."""
    with pytest.raises(CheckpointError, match="not measured with every number of drafts"):
        StepCosts.from_json([*REAL.to_json(), {**REAL.to_json()[0], "made": 7}])
