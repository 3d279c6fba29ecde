"""An engine's counts, as metrics of the Triton server in which it runs (its /metrics)."""

from __future__ import annotations

from typing import Any

from trtspec.llm import LLM

_COUNTERS = {
    "trtspec_steps_total": "Steps of the engine",
    "trtspec_output_tokens_total": "Tokens generated",
    "trtspec_generation_steps_total": "Steps that generated, of finished requests, with drafts or without",
    "trtspec_drafts_total": "Of those, steps that had drafts",
    "trtspec_draft_tokens_total": "Drafts verified, of finished requests",
    "trtspec_accepted_draft_tokens_total": "Drafts accepted, of finished requests",
    "trtspec_engine_failures_total": "Engines that failed",
}
_GAUGES = {
    "trtspec_engine_up": "1 while the engine takes requests, 0 from its failure until another is there",
    "trtspec_running_requests": "Requests in flight",
    "trtspec_kv_blocks_in_use": "KV blocks that requests hold",
}


class TritonMetrics:
    """The metrics of one model. A call of update passes each change to the server."""

    def __init__(self, pb: Any, model: str) -> None:
        # The server drops a family that is no longer referenced.
        self._families = {
            name: pb.MetricFamily(name=name, description=text, kind=kind)
            for texts, kind in ((_COUNTERS, pb.MetricFamily.COUNTER), (_GAUGES, pb.MetricFamily.GAUGE))
            for name, text in texts.items()
        }
        self._metrics = {name: family.Metric(labels={"model": model}) for name, family in self._families.items()}
        self._told = dict.fromkeys(self._metrics, 0)

    def failed(self) -> None:
        """Count an engine's failure. The counts of the next engine start from 0 again."""
        for name in _GAUGES:
            self._tell(name, 0)
        self._told |= dict.fromkeys(_COUNTERS, 0)
        self._metrics["trtspec_engine_failures_total"].increment(1)

    def update(self, llm: LLM, running: int) -> None:
        """Pass the engine's counts to the server. running: number of requests in flight."""
        stats = llm.get_metrics()
        now = {
            "trtspec_engine_up": 1,
            "trtspec_steps_total": stats.steps,
            "trtspec_output_tokens_total": stats.output_tokens,
            "trtspec_generation_steps_total": stats.speculation.steps,
            "trtspec_drafts_total": stats.speculation.num_drafts,
            "trtspec_draft_tokens_total": stats.speculation.num_draft_tokens,
            "trtspec_accepted_draft_tokens_total": stats.speculation.num_accepted_tokens,
            "trtspec_running_requests": running,
            "trtspec_kv_blocks_in_use": llm.num_kv_blocks_in_use,
        }
        for name, value in now.items():
            self._tell(name, value)

    def _tell(self, name: str, value: int) -> None:
        change = value - self._told[name]
        if change:
            self._metrics[name].increment(change)  # a gauge takes negative changes, too
            self._told[name] = value
