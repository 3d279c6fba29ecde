"""A line in the log every few seconds: the engine's speed and its accepted drafts, but no text of a request."""

from __future__ import annotations

import asyncio
import logging

from trtspec.engine.activity import INTERVAL, LOGGER, Activity
from trtspec.serve.http.service import Service

logger = logging.getLogger(LOGGER)


async def write_stats(service: Service, interval: float = INTERVAL) -> None:
    """Write a line every `interval` seconds in which something ran, for as long as the server runs.

    The front writes it, because the front's counts go on when an engine is replaced. The engine's own process writes
    no such line.
    """
    past = service.metrics.totals()
    while True:
        await asyncio.sleep(interval)
        now, load = service.metrics.totals(), service.client.load
        activity = Activity(now.since(past), load.running, load.waiting, load.kv_used)
        if not activity.is_idle:
            logger.info("stats", extra={"fields": activity.fields()})
        past = now
