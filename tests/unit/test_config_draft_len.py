"""The draft length of a batch: schedules, ranges and gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.config.speculation_plan import SpeculationPlan, TargetInfo, draft_len_for_batch
from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.planning import plan_speculation

TARGET = TargetInfo(
    model="/models/target",
    model_type="llama",
    vocab_size=4096,
    max_model_len=1024,
    num_hidden_layers=8,
    max_batch_size=8,
)
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


def decide(fields: Mapping[str, Any], **changes: Any) -> SpeculationPlan:
    return plan_speculation(SpeculativeConfig(**fields), dataclasses.replace(TARGET, **changes))


def lengths(fields: Mapping[str, Any], *batches: int, **changes: Any) -> list[int]:
    spec_plan = decide({**NGRAM, **fields}, **changes)
    return [draft_len_for_batch(spec_plan, n) for n in batches]


@pytest.mark.parametrize(
    ("fields", "batches", "expected"),
    [
        ({}, (0, 1, 8, 1000), [3, 3, 3, 3]),
        ({"disable_by_batch_size": 4}, (1, 4, 5), [3, 3, 0]),
        ({"max_concurrency": 4}, (1, 4, 5), [3, 3, 0]),
        ({"draft_len_schedule": {4: 3, 8: 1}}, (0, 1, 4, 5, 8, 9), [3, 3, 3, 1, 1, 0]),
        ({"draft_len_schedule": {8: 0, 4: 3}}, (4, 5, 8), [3, 0, 0]),
        ({"num_speculative_tokens_per_batch_size": [(1, 2, 9), (4, 5, 1)]}, (0, 1, 3, 4, 5, 99), [3, 3, 3, 1, 1, 1]),
        ({"disable_by_batch_size": 6, "draft_len_schedule": {4: 3, 8: 1}}, (4, 6, 7), [3, 1, 0]),
    ],
)
def test_draft_len_for_batch(fields: dict[str, Any], batches: tuple[int, ...], expected: list[int]) -> None:
    assert lengths(fields, *batches) == expected


def test_max_concurrency_counts_what_fits() -> None:
    # 8 requests wait, but only 16 // (1 + 3) = 4 fit into a step.
    assert lengths({"max_concurrency": 4}, 8, max_num_tokens=16) == [3]
    assert lengths({"max_concurrency": 4}, 8, max_num_tokens=20) == [0]
    assert lengths({"max_concurrency": 4}, 8, max_batch_size=4) == [3]


K = 6
schedules = st.dictionaries(st.integers(1, 40), st.integers(0, K), min_size=1, max_size=6).map(
    lambda schedule: {**schedule, min(schedule): K}
)


@given(schedules, st.integers(1, 60))
def test_schedule_takes_the_smallest_key_that_covers_the_batch(schedule: dict[int, int], batch: int) -> None:
    covering = [key for key in schedule if key >= batch]
    expected = schedule[min(covering)] if covering else 0
    assert lengths({"num_speculative_tokens": K, "draft_len_schedule": schedule}, batch) == [expected]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, K + 2)), min_size=1, max_size=5), st.data()
)
def test_ranges_carry_the_previous_k(steps: list[tuple[int, int, int]], data: st.DataObject) -> None:
    ranges: list[tuple[int, int, int]] = []
    table: dict[int, int] = {}
    start = 1
    for gap, width, k in steps:
        start += gap if ranges else 0
        for n in range(len(table) + 1, start):  # the gap before this range
            table[n] = table[n - 1]
        ranges.append((start, start + width, k))
        table.update({n: min(k, K) for n in range(start, start + width + 1)})
        start += width + 1
    batch = data.draw(st.integers(1, len(table) + 10))
    expected = table.get(batch, table[len(table)])
    fields = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": ranges}
    assert lengths(fields, batch) == [expected]


@given(schedules, st.integers(2, 40), st.integers(0, 60))
def test_more_gates_never_draft_more(schedule: dict[int, int], limit: int, batch: int) -> None:
    base = {"num_speculative_tokens": K, "draft_len_schedule": schedule}
    (both,) = lengths({**base, "disable_by_batch_size": limit}, batch)
    assert both == min(
        *lengths(base, batch), *lengths({"num_speculative_tokens": K, "disable_by_batch_size": limit}, batch)
    )
    assert 0 <= both <= K
