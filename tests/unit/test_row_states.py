"""Rows of hidden states: the rows that are kept, and where they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtspec.engine.row_states import RowStates


class OnDevice(Tensor):
    """A stand-in for a GPU's tensor."""

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def step(states: RowStates, request: Any, num_rows: int, accepted: int, mark: float) -> None:
    """Collect rows of the value `mark` after the last committed row, and commit `accepted` of them."""
    made = torch.full((num_rows, 2), mark).as_subclass(OnDevice)
    states.collect([SimpleNamespace(request=request, num_rows=num_rows)], made)  # type: ignore[arg-type]
    request.kv.committed += accepted


def test_rows_stay_where_they_are_for_a_step() -> None:
    states, request = RowStates(), SimpleNamespace(request_id=3, kv=SimpleNamespace(committed=0))
    step(states, request, 5, 5, 1.0)
    step(states, request, 4, 2, 2.0)  # two are rejected
    step(states, request, 3, 3, 3.0)
    assert [type(rows) for _, rows in states._chunks[3]] == [Tensor, Tensor, OnDevice]
    assert [start for start, _ in states._chunks[3]] == [0, 5, 7]
    rows = states.rows(request, 3, 10)
    assert rows is not None
    assert rows[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert states.rows(request, 3, 11) is None
    states.drop(request, 7)
    assert states.rows(request, 6, 9) is None
    assert states.rows(request, 7, 10) is not None


def test_a_chunk_goes_when_all_that_was_committed_of_it_was_read() -> None:
    states, request = RowStates(), SimpleNamespace(request_id=3, kv=SimpleNamespace(committed=0))
    step(states, request, 4, 2, 1.0)
    states.drop(request, 1)
    assert states.rows(request, 1, 2) is not None
    states.drop(request, 2)
    assert not states._chunks[3]


def test_rows_of_an_accepted_path_are_kept_in_its_order() -> None:
    """A context's rows are in line, whatever the path says of it."""
    states = RowStates()
    batch = [
        SimpleNamespace(
            request=SimpleNamespace(request_id=i, kv=SimpleNamespace(committed=0)), num_rows=rows, is_context=i == 0
        )
        for i, rows in enumerate((4, 5))
    ]
    path = torch.tensor([[0, -1, -1, -1, -1], [0, 2, 4, -1, -1]])
    states.collect(batch, torch.arange(9.0)[:, None], path)  # type: ignore[arg-type]
    kept = [states.rows(row.request, 0, count) for row, count in zip(batch, (4, 3), strict=True)]
    assert [None if one is None else one[:, 0].tolist() for one in kept] == [[0, 1, 2, 3], [4, 6, 8]]
    assert states.rows(batch[1].request, 0, 4) is None
