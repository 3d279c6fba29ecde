"""The time of a step, between the steps that were measured."""

from __future__ import annotations

import pytest

from trtspec.engine.step_costs import Cell, StepCosts
from trtspec.errors import CheckpointError

CELLS = [
    Cell(made=0, batch=1, verified=0, seconds=1.0),
    Cell(made=0, batch=4, verified=0, seconds=4.0),
    Cell(made=2, batch=1, verified=0, seconds=2.0),
    Cell(made=2, batch=1, verified=2, seconds=3.0),
    Cell(made=2, batch=4, verified=0, seconds=5.0),
    Cell(made=2, batch=4, verified=2, seconds=9.0),
]


def test_measured_steps_have_their_own_time() -> None:
    costs = StepCosts(CELLS)
    assert costs.draft_lens == (0, 2)
    for cell in CELLS:
        assert costs.curve(cell.made, cell.batch, 2)[cell.batch * cell.verified] == pytest.approx(cell.seconds)


def test_steps_between_them_lie_on_lines() -> None:
    costs = StepCosts(CELLS)
    assert costs.curve(2, 1, 2) == pytest.approx([2.0, 2.5, 3.0])
    assert costs.curve(2, 4, 2) == pytest.approx([5 + n / 2 for n in range(9)])
    assert costs.curve(2, 2, 2) == pytest.approx([3.0, 3.5, 4.0, 4.5, 5.0])  # a third of the way from batch 1 to 4


def test_more_drafts_than_measured_continue_the_line() -> None:
    assert StepCosts(CELLS).curve(2, 1, 4) == pytest.approx([2.0, 2.5, 3.0, 3.5, 4.0])


def test_a_larger_batch_than_measured_takes_time_in_proportion() -> None:
    assert StepCosts(CELLS).curve(2, 8, 2)[16] == pytest.approx(18.0)


def test_a_cell_that_was_disturbed_takes_no_longer_than_more_work() -> None:
    slow = [Cell(0, 1, 0, 2.0), Cell(0, 1, 1, 1.5), Cell(0, 2, 0, 1.0), Cell(0, 2, 1, 3.0)]
    costs = StepCosts(slow)
    assert costs.curve(0, 1, 1) == pytest.approx([1.0, 1.5])
    assert costs.curve(0, 2, 1) == pytest.approx([1.0, 2.0, 3.0])
    assert StepCosts([*slow, Cell(1, 1, 0, 0.7)]).curve(0, 1, 1)[0] == pytest.approx(0.7)


def test_they_are_kept_as_json() -> None:
    assert StepCosts.from_json(StepCosts(CELLS).to_json()).cells == tuple(CELLS)


@pytest.mark.parametrize(
    "data",
    [None, [], {}, [1], [{"made": 0}], [{"made": 0, "batch": 1, "verified": 0, "seconds": 0.0}], [{"made": "x"}]],
)
def test_damaged_json_is_refused(data: object) -> None:
    with pytest.raises(CheckpointError, match="step times are damaged"):
        StepCosts.from_json(data)
