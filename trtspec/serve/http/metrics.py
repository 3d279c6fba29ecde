"""Prometheus metrics of the front, and of the engine as it was after its last step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.engine.activity import Totals
from trtspec.outputs import SpeculationStats
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class HTTPMetrics:
    """The metrics of one server. name: the model's name for clients. Times are in seconds."""

    def __init__(self, client: EngineClient, name: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "trtspec_requests", "requests by endpoint and HTTP status", ("endpoint", "status"), registry=registry
        )
        self.finished = Counter("trtspec_samples", "samples by finish reason", ("reason",), registry=registry)
        self.prompt_tokens = Counter("trtspec_prompt_tokens", "tokens of prompts", registry=registry)
        self.tokens = Counter("trtspec_generated_tokens", "tokens generated", registry=registry)
        self.speculation = SpeculationStats()  # of all samples, running ones included
        self.first_token = Histogram(
            "trtspec_time_to_first_token_seconds", "from request to first token", buckets=_SECONDS, registry=registry
        )
        self.between_tokens = Histogram(
            "trtspec_inter_token_seconds",
            "between tokens: the time between two steps by the tokens of the second",
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "trtspec_request_seconds", "from request to last token", buckets=_SECONDS, registry=registry
        )
        self.refused = Counter("trtspec_refused", "requests refused because the queue was full", registry=registry)
        self.disconnects = Counter("trtspec_disconnects", "requests whose client went away", registry=registry)
        self.restarts = Counter("trtspec_engine_restarts", "engines that died and were replaced", registry=registry)
        self.viewers = Gauge("trtspec_live_viewers", "live views that are open", registry=registry)
        registry.register(_SpeculationCollector(client, self.speculation, name))
        registry.register(_EngineCollector(client))

    def count(self, delta: Delta) -> None:
        """Count a step's output for a sample."""
        self.tokens.inc(len(delta.token_ids))
        delta.add_to(self.speculation)
        if delta.finish_reason is not None:
            self.finished.labels(delta.finish_reason).inc()

    def totals(self) -> Totals:
        """The totals now."""
        prompt_tokens, generated = (_total(counter) for counter in (self.prompt_tokens, self.tokens))
        return Totals(time.monotonic(), prompt_tokens, generated, self.speculation.copy())

    def text(self) -> bytes:
        """The metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)


def _total(counter: Counter) -> int:
    """Sum of a counter over all its labels."""
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


class _SpeculationCollector(Collector):
    """A collector of speculation counts. Steps count per sample. All K positions are present, with 0 before any draft.

    For an engine that speculates, the same counts also have vLLM's names, for dashboards that ask for these.
    """

    def __init__(self, client: EngineClient, stats: SpeculationStats, model_name: str) -> None:
        self._client = client
        self._stats = stats
        self._labels = {"model_name": model_name, "engine": "0"}  # as in vLLM

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield CounterMetricFamily(
            "trtspec_generation_steps", "steps of samples that generate, with drafts or without", value=stats.steps
        )
        yield CounterMetricFamily("trtspec_drafts", "of those, steps that had drafts", value=stats.num_drafts)
        yield self._by_position("trtspec_draft_tokens", "draft tokens verified, by position", stats.drafted)
        yield self._by_position("trtspec_accepted_tokens", "draft tokens accepted, by position", stats.accepted)
        if self._most_drafts:
            yield self._total("vllm:spec_decode_num_drafts", "steps that had drafts", stats.num_drafts)
            yield self._total("vllm:spec_decode_num_draft_tokens", "draft tokens verified", stats.num_draft_tokens)
            yield self._total("vllm:spec_decode_num_accepted_tokens", "of those, accepted", stats.num_accepted_tokens)
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            yield self._by_position(name, "draft tokens accepted, by position", stats.accepted, self._labels)

    @property
    def _most_drafts(self) -> int:
        """K of the engine; 0 before it is known."""
        return 0 if self._client.info is None else self._client.info.max_draft_len

    def _total(self, name: str, text: str, count: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), count)
        return family

    def _by_position(self, name: str, text: str, counts: Sequence[int], labels: Mapping[str, str] = {}) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*labels, "position"))
        for position, count in enumerate([*counts, *[0] * (self._most_drafts - len(counts))]):
            family.add_metric((*labels.values(), str(position)), count)
        return family


class _EngineCollector(Collector):
    """A collector of the engine's own counts, which restart from 0 with every engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        load, ready = self._client.load, self._client.state == "ready"
        yield GaugeMetricFamily("trtspec_engine_up", "1 while requests can run", value=ready)
        yield GaugeMetricFamily(
            "trtspec_engine_silent_seconds", "since its last word, while it has work", value=self._client.silence
        )
        yield GaugeMetricFamily("trtspec_running", "samples in the running batch", value=load.running)
        yield GaugeMetricFamily("trtspec_waiting", "samples that wait", value=load.waiting)
        yield GaugeMetricFamily("trtspec_kv_used_ratio", "share of the KV cache's blocks in use", value=load.kv_used)
        yield CounterMetricFamily("trtspec_steps", "steps of the engine", value=load.steps)
        seconds = CounterMetricFamily("trtspec_step_seconds", "time in steps, by phase", labels=("phase",))
        seconds.add_metric(("launch",), load.launch_seconds)
        seconds.add_metric(("host",), max(load.step_seconds - load.launch_seconds, 0.0))
        yield seconds
        yield CounterMetricFamily("trtspec_preemptions", "requests that gave up their blocks", value=load.preemptions)
        yield CounterMetricFamily(
            "trtspec_prefix_query_tokens", "tokens looked up in the cache", value=load.prefix_query_tokens
        )
        yield CounterMetricFamily(
            "trtspec_prefix_hit_tokens", "tokens found there, and not computed", value=load.prefix_hit_tokens
        )
        yield CounterMetricFamily(
            "trtspec_drafter_failures", "calls of the drafter that failed", value=load.drafter_failures
        )
