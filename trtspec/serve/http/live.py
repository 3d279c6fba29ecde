"""The live view: a page at /, its files under /dashboard, and at /live a feed of the engine's activity.

Like /metrics, none of these needs an API key. The page holds no data. The feed has counts, the model's name, the
engine's state and its limits, but no texts. To generate, the page sends requests to /v1, with a key if one is needed.
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
    # resources of this origin only, nothing inline, not inside a frame
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Counts:
    """The totals at one moment, for taking differences."""

    totals: Totals
    steps: int  # of the current engine

    @staticmethod
    def now(service: Service) -> Counts:
        """The counts of a server at this moment."""
        return Counts(service.metrics.totals(), service.client.load.steps)

    def since(self, past: Counts) -> dict[str, Any]:
        """Counts since an earlier moment; `accepted` and `drafted` are by position, up to the last that had drafts."""
        news = self.totals.since(past.totals)
        seconds = max(news.seconds, 1e-3)
        return {
            "seconds": seconds,
            "tokens_per_second": round(news.generated_tokens / seconds, 1),
            # a restarted engine counts from zero
            "steps_per_second": round(max(self.steps - past.steps, 0) / seconds, 1),
            "drafted": news.speculation.drafted,
            "accepted": news.speculation.accepted,
        }


async def feed(service: Service) -> AsyncIterator[bytes]:
    """Yield server-sent events until the reader leaves or the server is told to stop, which waits for no viewer."""
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
        del info["model"]  # a path of this machine, which viewers must not see
    return {
        "name": service.name,
        "state": client.state,
        "last_engine_ended": client.why,
        "needs_key": bool(service.settings.api_keys),
        "facts": info,
        "load": asdict(client.load),
    }


def live_view(service: Service) -> APIRouter:
    """Routes of the live view, which are not part of the API's schema."""
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
