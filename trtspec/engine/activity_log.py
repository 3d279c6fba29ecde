"""A line of the log every few seconds that an engine spends in steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trtspec.engine.activity import INTERVAL, LOGGER, Activity, Totals
from trtspec.engine.scheduler import Scheduler
from trtspec.engine.stats import EngineStats
from trtspec.engine.step import Emission
from trtspec.outputs import SpeculationStats

logger = logging.getLogger(LOGGER)


class ActivityLog:
    """For whoever steps the engine. Its clock is the time in steps: an idle engine writes nothing, and its speeds are
    those that it has while it works. What came after the last line is not written.

    interval: seconds in steps from one line to the next.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, interval: float = INTERVAL) -> None:
        self.interval = interval
        self._stats = stats
        self._scheduler = scheduler
        self._speculation = SpeculationStats()  # of requests that run, too; the engine's own counts those that ended
        self._written = self._now()

    def observe(self, emissions: Iterable[Emission]) -> None:
        """After each step: count what it gave, and write a line if one is due."""
        for emission in emissions:
            if emission.tokens and not emission.is_context:
                kept = emission.num_drafts + emission.num_past_end
                self._speculation.observe(kept + 1, emission.draft_len)
        if self._stats.step_time - self._written.seconds >= self.interval:
            now = self._now()
            activity = Activity(
                now.since(self._written),
                running=len(self._scheduler.running),
                waiting=self._scheduler.num_waiting,
                kv_used=self._scheduler.kv_used,
            )
            if not activity.is_idle:
                logger.info("stats: %s", activity.words())
            self._written = now

    def _now(self) -> Totals:
        stats = self._stats
        return Totals(stats.step_time, stats.prompt_tokens, stats.output_tokens, self._speculation.copy())
