"""The fields and the words of a line on acceptance and throughput."""

from __future__ import annotations

import json

from trtspec.engine.activity import Activity, Totals
from trtspec.outputs import SpeculationStats

DRAFTED = SpeculationStats({(3, 3): 2, (1, 2): 2, (1, 0): 6})
"""Ten steps, four of them with drafts: ten tokens drafted, four accepted."""


def test_figures_are_of_the_interval() -> None:
    past = Totals(100.0, 1000, 5000, SpeculationStats({(4, 3): 50}))
    now = Totals(110.0, 1250, 5014, SpeculationStats.total([past.speculation, DRAFTED]))
    assert Activity(now.since(past), running=3, waiting=1, kv_used=0.25).fields() == {
        "seconds": 10.0,
        "prompt_tokens_per_second": 25.0,
        "generated_tokens_per_second": 1.4,
        "running": 3,
        "waiting": 1,
        "kv_used": 0.25,
        "tokens_per_step": 1.4,
        "acceptance_length": 2.0,
        "accepted_tokens_per_second": 0.4,
        "drafted_tokens_per_second": 1.0,
        "accepted_tokens": 4,
        "drafted_tokens": 10,
        "acceptance_rate": 0.4,
        "acceptance_per_position": [0.5, 0.5, 0.0],
    }


def test_without_drafts_nothing_is_said_of_them() -> None:
    plain = Activity(Totals(2.0, 0, 8, SpeculationStats({(1, 0): 8})), 1, 0, 0.5)
    reading = Activity(Totals(2.0, 8, 0), 1, 0, 0.5)
    assert (plain.fields()["tokens_per_step"], reading.fields()["tokens_per_step"]) == (1.0, None)
    for activity in (plain, reading):
        assert not [name for name in activity.fields() if "accept" in name or "draft" in name]
        json.dumps(activity.fields(), allow_nan=False)


def test_words_are_the_fields() -> None:
    words = Activity(Totals(2.0, 8, 0), 1, 0, 0.5).words()
    assert words.startswith("seconds 2.0, prompt tokens per second 4.0, generated tokens per second 0.0, running 1, ")
    assert words.endswith("kv used 0.5, tokens per step -")
    assert Activity(Totals(1.0, 0, 14, DRAFTED), 1, 0, 0.5).words().endswith("acceptance per position 0.5 0.5 0.0")


def test_an_engine_is_idle_where_nothing_came_and_nothing_is_there() -> None:
    assert Activity(Totals(10.0), 0, 0, 0.0).is_idle
    for busy in (Activity(Totals(10.0, 1), 0, 0, 0.0), Activity(Totals(10.0, 0, 1), 0, 0, 0.0)):
        assert not busy.is_idle
    assert not Activity(Totals(10.0), 1, 0, 0.0).is_idle
    assert not Activity(Totals(10.0), 0, 1, 0.0).is_idle
