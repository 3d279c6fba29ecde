"""A line of the log every few seconds: how fast the engine is and how many drafts it keeps; no word of a request."""

from __future__ import annotations

import asyncio
import logging

from trtspec.engine.activity import INTERVAL, LOGGER, Activity
from trtspec.serve.http.service import Service

logger = logging.getLogger(LOGGER)


async def write_stats(service: Service, interval: float = INTERVAL) -> None:
    """For as long as the server runs, every `interval` seconds in which something ran. The front writes it, whose
    counts go on when an engine is replaced; the engine's own process is silent."""
    past = service.metrics.totals()
    while True:
        await asyncio.sleep(interval)
        now, load = service.metrics.totals(), service.client.load
        activity = Activity(now.since(past), load.running, load.waiting, load.kv_used)
        if not activity.is_idle:
            logger.info("stats", extra={"fields": activity.fields()})
        past = now
