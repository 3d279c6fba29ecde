"""Outputs of a request: the counts of speculation, and the figures derived from them."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.outputs import CompletionOutput, RequestOutput, SpeculationStats, or_none


def observed(*steps: tuple[int, int]) -> SpeculationStats:
    """Stats of steps given as (drafted, accepted)."""
    stats = SpeculationStats()
    for drafted, accepted in steps:
        stats.observe(num_tokens=accepted + 1, draft_len=drafted)
    return stats


def test_counts_of_vllm() -> None:
    """Three drafts have 8 tokens, of which 4 are accepted. Position 0 is accepted twice."""
    stats = observed((3, 3), (3, 1), (2, 0))
    assert stats.steps == stats.num_drafts == 3
    assert stats.num_draft_tokens == 8
    assert stats.num_accepted_tokens == 4
    assert stats.accepted == [2, 1, 1]
    assert stats.drafted == [3, 3, 2]


def test_acceptance_length_counts_the_bonus() -> None:
    stats = observed((3, 3), (3, 1), (2, 0))
    assert stats.tokens == 7
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)


def test_acceptance_per_position_is_a_share_of_what_was_offered_there() -> None:
    assert observed((3, 3), (3, 1), (2, 0)).acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])


def test_steps_without_drafts_do_not_shorten_the_acceptance_length() -> None:
    stats = observed((3, 3), (0, 0), (2, 0), (0, 0))
    assert (stats.steps, stats.num_drafts) == (4, 2)
    assert stats.acceptance_length == 1 + 3 / 2
    assert stats.tokens_per_step == 7 / 4


def test_plain_decoding_has_tokens_per_step_and_no_acceptance_length() -> None:
    stats = observed((0, 0), (0, 0))
    assert math.isnan(stats.acceptance_length)
    assert (stats.tokens_per_step, stats.num_drafts) == (1.0, 0)
    assert stats.acceptance_per_position == []


def test_before_the_first_step_there_is_neither() -> None:
    assert math.isnan(SpeculationStats().acceptance_length)
    assert math.isnan(SpeculationStats().tokens_per_step)


def test_json_has_no_nan() -> None:
    stats = observed((0, 0))
    figures = [or_none(stats.acceptance_length), or_none(stats.tokens_per_step)]
    assert json.dumps(figures, allow_nan=False) == "[null, 1.0]"


def test_drafts_may_grow_longer_later() -> None:
    stats = observed((1, 1), (0, 0), (3, 2))
    assert (stats.drafted, stats.accepted) == ([2, 1, 1], [2, 1, 0])


steps = st.lists(st.integers(0, 5).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=10)


@given(parts=st.lists(steps, max_size=4))
def test_a_total_is_as_if_observed_together(parts: list[list[tuple[int, int]]]) -> None:
    total = SpeculationStats.total(observed(*part) for part in parts)
    assert total == observed(*(step for part in parts for step in part))


@given(before=steps, after=steps)
def test_what_came_since_is_as_if_observed_alone(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    assert observed(*before, *after).since(observed(*before)) == observed(*after)


def test_a_copy_hears_of_nothing_later() -> None:
    stats = observed((2, 1))
    copy = stats.copy()
    stats.observe(3, 2)
    assert copy == observed((2, 1))


def test_a_total_leaves_its_parts_alone() -> None:
    part = observed((2, 1))
    total = SpeculationStats.total([part, part])
    total.observe(3, 2)
    assert part == observed((2, 1))


def completion(index: int, stats: SpeculationStats) -> CompletionOutput:
    return CompletionOutput(
        index=index, text="", token_ids=[], finish_reason="length", stop_reason=None, seed=None, speculation=stats
    )


def test_a_request_sums_its_samples() -> None:
    request = RequestOutput(
        request_id=0,
        prompt=None,
        prompt_token_ids=[1],
        outputs=[completion(0, observed((3, 3), (3, 1))), completion(1, observed((2, 0)))],
        finished=True,
    )
    assert request.speculation == observed((3, 3), (3, 1), (2, 0))
    assert request.steps == 3
    assert request.acceptance_length == request.tokens_per_step == pytest.approx(7 / 3)
    assert request.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])


def test_samples_keep_their_own_counts() -> None:
    outputs = [completion(0, observed((3, 3))), completion(1, observed((3, 0)))]
    request = RequestOutput(request_id=0, prompt=None, prompt_token_ids=[1], outputs=outputs, finished=True)
    assert request.speculation.acceptance_per_position == [0.5, 0.5, 0.5]
    assert [output.speculation.acceptance_length for output in request.outputs] == [4.0, 1.0]
