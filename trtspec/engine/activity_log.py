"""Writes a log line after every few seconds that an engine spends in steps."""

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
    """A log of the engine's activity, for the code that steps the engine.

    Its clock is the time in steps. So an idle engine writes nothing, and the speeds are those of a working engine.
    Activity after the last line is not written.
    interval: seconds in steps between two lines.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, interval: float = INTERVAL) -> None:
        self.interval = interval
        self._stats = stats
        self._scheduler = scheduler
        self._speculation = SpeculationStats()  # of running requests, too; the engine's stats cover ended ones alone
        self._written = self._now()

    def observe(self, emissions: Iterable[Emission]) -> None:
        """Count the emissions of a step, and write a line if one is due. Call this after each step."""
        for emission in emissions:
            if emission.tokens and not emission.is_context:
                kept = emission.num_drafts + emission.num_past_end
                self._speculation.observe(kept + 1, emission.draft_len, depth=emission.draft_depth)
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
