"""Activity of an engine in an interval, for a log line: speeds and drafts, and no content of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtspec.outputs import SpeculationStats, or_none

INTERVAL = 10.0
"""Seconds between two lines."""

LOGGER = "trtspec.stats"
"""Name of the logger that writes the lines."""


@dataclass(frozen=True)
class Totals:
    """Totals since the start, whose differences are logged. Steps of requests that still run count, too."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def since(self, past: Totals) -> Totals:
        """Difference to the totals of an earlier moment."""
        return Totals(
            self.seconds - past.seconds,
            self.prompt_tokens - past.prompt_tokens,
            self.generated_tokens - past.generated_tokens,
            self.speculation.since(past.speculation),
        )


@dataclass(frozen=True)
class Activity:
    """Totals of an interval, and the load of the engine at its end."""

    news: Totals
    running: int  # samples
    waiting: int
    kv_used: float  # share of the cache's blocks, 0 to 1

    @property
    def is_idle(self) -> bool:
        """Whether there were no tokens, and nothing runs or waits. Then no line is due."""
        return not (self.news.prompt_tokens or self.news.generated_tokens or self.running or self.waiting)

    def fields(self) -> dict[str, Any]:
        """Fields for JSON.

        Times are in seconds, shares 0 to 1. Fields of drafts are there only if a step had drafts.
        """
        news, stats = self.news, self.news.speculation
        per_second = 1 / max(news.seconds, 1e-3)
        fields: dict[str, Any] = {
            "seconds": round(news.seconds, 3),
            "prompt_tokens_per_second": round(news.prompt_tokens * per_second, 1),
            "generated_tokens_per_second": round(news.generated_tokens * per_second, 1),
            "running": self.running,
            "waiting": self.waiting,
            "kv_used": round(self.kv_used, 4),
            "tokens_per_step": or_none(round(stats.tokens_per_step, 3)),
        }
        if not stats.num_drafts:
            return fields
        return fields | {
            "acceptance_length": round(stats.acceptance_length, 3),
            "accepted_tokens_per_second": round(stats.num_accepted_tokens * per_second, 1),
            "drafted_tokens_per_second": round(stats.num_draft_tokens * per_second, 1),
            "accepted_tokens": stats.num_accepted_tokens,
            "drafted_tokens": stats.num_draft_tokens,
            "acceptance_rate": round(stats.num_accepted_tokens / stats.num_draft_tokens, 4),
            "acceptance_per_position": [round(share, 4) for share in stats.acceptance_per_position],
        }

    def words(self) -> str:
        """The fields as text for people; "-" where there is no figure."""
        shown = {name: value if isinstance(value, list) else [value] for name, value in self.fields().items()}
        parts = [(name, ["-" if one is None else str(one) for one in values]) for name, values in shown.items()]
        return ", ".join(f"{name.replace('_', ' ')} {' '.join(values)}" for name, values in parts)
