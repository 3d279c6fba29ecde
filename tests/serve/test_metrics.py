"""The drafts in /metrics, under trtspec's names and under vLLM's, without an engine."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta, EngineInfo
from trtspec.serve.http.metrics import HTTPMetrics

VLLM = "vllm:spec_decode_num_"
OF_ENGINE = (("engine", "0"), ("model_name", "coder"))
STEPS = [(3, 2), (3, 0), (2, 2), (0, 0)]
"""Number of drafts verified and accepted in each step."""

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def metrics_of(max_draft_len: int) -> HTTPMetrics:
    client = EngineClient({})
    client.info = EngineInfo("folder", 16, 512, 4, 400, "NGRAM" if max_draft_len else "NONE", max_draft_len, False)
    return HTTPMetrics(client, "coder")


def observe(metrics: HTTPMetrics) -> None:
    metrics.count(Delta(0, 0, "a", [1], [], 0, True))  # prefill of the prompt
    for drafted, accepted in STEPS:
        metrics.count(Delta(0, 0, "a", [1] * (accepted + 1), [1] * drafted, accepted, False))


def scraped(metrics: HTTPMetrics) -> Samples:
    """Return the samples: name -> labels -> value."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def by_position(values: list[float], *labels: tuple[str, str]) -> dict[tuple[tuple[str, str], ...], float]:
    return {(*labels, ("position", str(i))): value for i, value in enumerate(values)}


def test_vllms_dashboards_find_their_metrics() -> None:
    """Names and labels are those of vllm/v1/spec_decode/metrics.py."""
    metrics = metrics_of(3)
    observe(metrics)
    found = scraped(metrics)
    assert {name: found[name] for name in found if name.startswith("vllm:")} == {
        f"{VLLM}drafts_total": {OF_ENGINE: 3},
        f"{VLLM}draft_tokens_total": {OF_ENGINE: 8},
        f"{VLLM}accepted_tokens_total": {OF_ENGINE: 4},
        f"{VLLM}accepted_tokens_per_pos_total": by_position([2, 2, 0], *OF_ENGINE),
    }


def test_our_names_say_the_same_and_count_steps_without_drafts() -> None:
    metrics = metrics_of(3)
    observe(metrics)
    found = scraped(metrics)
    assert (found["trtspec_drafts_total"], found["trtspec_generation_steps_total"]) == ({(): 3}, {(): 4})
    assert found["trtspec_draft_tokens_total"] == by_position([3, 3, 2])
    assert found["trtspec_accepted_tokens_total"] == by_position([2, 2, 0])


def test_there_is_a_zero_before_the_first_draft() -> None:
    """Counters are 0 before the first draft, because a rate would otherwise miss the first values."""
    found = scraped(metrics_of(2))
    assert found[f"{VLLM}drafts_total"] == {OF_ENGINE: 0}
    assert found[f"{VLLM}accepted_tokens_per_pos_total"] == by_position([0, 0], *OF_ENGINE)
    assert found["trtspec_draft_tokens_total"] == by_position([0, 0])


def test_an_engine_without_speculation_has_none_of_vllms_as_there() -> None:
    metrics = metrics_of(0)
    observe(metrics)
    assert not [name for name in scraped(metrics) if name.startswith("vllm:")]


def test_drafts_past_the_end_of_a_sample_count_as_accepted() -> None:
    """Drafts past the end of a sample count as accepted, as in vLLM and in SpeculationStats.

    The sample ends at the second of three accepted drafts.
    """
    metrics = metrics_of(3)
    metrics.count(Delta(0, 0, "a", [1, 2], [1, 2, 3], 2, False, "stop", num_past_end=1))
    assert scraped(metrics)[f"{VLLM}accepted_tokens_total"] == {OF_ENGINE: 3}
