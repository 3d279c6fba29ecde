"""The live view: a page at /, what it is made of under /dashboard, and at /live a feed of what the engine does.

None of it wants an API key, as /metrics does not: the page holds nothing, and the feed tells counts alone. What the
page generates it asks of /v1, with a key where one is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from trtspec.engine.activity import Totals
from trtspec.serve.http.api_errors import ApiError
from trtspec.serve.http.replies import event
from trtspec.serve.http.service import Service

PERIOD = 0.25
"""Seconds between two events of the feed."""

FOLDER = Path(__file__).parents[1] / "dashboard"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # of this origin alone, nothing inline, in nobody's frame
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Counts:
    """Totals at a moment, to take differences of."""

    totals: Totals
    steps: int  # of the engine that runs

    @staticmethod
    def now(service: Service) -> Counts:
        """Those of a server."""
        return Counts(service.metrics.totals(), service.client.load.steps)

    def since(self, past: Counts) -> dict[str, Any]:
        """What has come since an earlier moment; drafts accepted and drafted by position, as far as there were any."""
        news = self.totals.since(past.totals)
        seconds = max(news.seconds, 1e-3)
        return {
            "seconds": seconds,
            "tokens_per_second": round(news.generated_tokens / seconds, 1),
            # an engine that was started anew counts from zero
            "steps_per_second": round(max(self.steps - past.steps, 0) / seconds, 1),
            "drafted": news.speculation.drafted,
            "accepted": news.speculation.accepted,
        }


async def feed(service: Service) -> AsyncIterator[bytes]:
    """Server-sent events until the reader leaves or the server is told to stop, which waits for nobody who looks on."""
    past = Counts.now(service)
    with service.metrics.viewers.track_inprogress():
        while not service.stopping:
            counts = Counts.now(service)
            yield event({**_state(service), **counts.since(past)})
            past = counts
            await asyncio.sleep(PERIOD)


def _state(service: Service) -> dict[str, Any]:
    client = service.client
    info = None
    if client.info is not None:
        info = asdict(client.info)
        del info["model"]  # a path of this machine is nobody's business
    return {
        "name": service.name,
        "state": client.state,
        "last_engine_ended": client.why,
        "needs_key": bool(service.settings.api_keys),
        "facts": info,
        "load": asdict(client.load),
    }


def live_view(service: Service) -> APIRouter:
    """The page's routes; not part of the API's schema."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}

    @router.get("/")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/dashboard/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no /dashboard/{name}")
        return _file(name)

    @router.get("/live")
    async def live() -> Response:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed(service), media_type="text/event-stream", headers=headers)

    def _file(name: str) -> Response:
        return Response(files[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=_HEADERS)

    return router
