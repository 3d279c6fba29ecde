"""A record of every request: its id, its outcome and its duration, but no text of a prompt or of an answer.

The handlers of a request add to its record through outcome.current().
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtspec.outputs import or_none
from trtspec.serve.http.outcome import CURRENT, Outcome

logger = logging.getLogger("trtspec.serve.requests")

ENDPOINTS = {"/v1/completions", "/v1/chat/completions", "/v1/models"}
"""Endpoints that logs and metrics name; a path that a client makes up is written nowhere."""
_OPERATORS = {"/health", "/ready", "/metrics", "/version"}
_TRACE = ("traceparent", "tracestate")
_GOOD_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


@dataclass
class Record(Outcome):
    """A record of one request. Times are nanoseconds since 1970 for `began` and `ended`, seconds for the rest."""

    id: str
    method: str
    endpoint: str  # one of our paths, or "other"
    trace: dict[str, str]  # headers of the request that name its trace
    began: int = field(default_factory=time.time_ns)
    ended: int = 0
    status: int = 499  # of the answer; 499: none was sent
    start: float = field(default_factory=time.perf_counter)  # `began` on the clock of durations

    @property
    def reason(self) -> str:
        """Why the request ended: finish reasons, "ok", or a word for what went wrong."""
        if self.generation is not None:
            return str(self.generation.reason)
        return self.error or ("ok" if self.status < 400 else "client_gone" if self.status == 499 else "error")

    @property
    def first_token_at(self) -> int | None:
        """Time of the first token in nanoseconds since 1970; None if there was none."""
        if self.generation is None or self.generation.first_token is None:
            return None
        return self.began + int((self.generation.started - self.start + self.generation.first_token) * 1e9)

    def finish(self) -> None:
        """Set the end of the request, which has been answered or will not be."""
        self.ended = self.began + int((time.perf_counter() - self.start) * 1e9)

    def fields(self) -> dict[str, Any]:
        """Fields of the request's line in the log."""
        fields: dict[str, Any] = {"id": self.id, "endpoint": self.endpoint, "status": self.status}
        if self.generation is not None:
            usage, first = self.generation.usage(), self.generation.first_token
            stats = self.generation.speculation
            fields |= {
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "acceptance_length": or_none(round(stats.acceptance_length, 3)),
                "tokens_per_step": or_none(round(stats.tokens_per_step, 3)),
                "first_token_seconds": None if first is None else round(first, 6),
            }
        return {**fields, "seconds": round((self.ended - self.began) / 1e9, 6), "reason": self.reason}


def write(record: Record) -> None:
    """Write a record as one line of the log.

    A failure of the server is a `warning`, a successful request to an operators' endpoint a `debug` event.
    """
    level = logging.WARNING if record.status >= 500 else logging.INFO
    if record.endpoint in _OPERATORS and record.status < 400:
        level = logging.DEBUG
    logger.log(level, "request", extra={"fields": record.fields()})


def request_id(given: bytes | None) -> str:
    """The client's X-Request-Id if it is 1 to 128 printable ASCII characters, else a new id."""
    return given.decode("ascii") if given and _GOOD_ID.fullmatch(given) else secrets.token_hex(16)


class RequestLog:
    """An ASGI middleware around all others except StalledClients; it keeps a request's record.

    At the end it passes the record to its listeners. The answer has the request's id in X-Request-Id.
    """

    def __init__(self, app: ASGIApp, listeners: Sequence[Callable[[Record], None]] = (write,)) -> None:
        self.app = app
        self.listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path = scope["path"] if scope["path"] in ENDPOINTS | _OPERATORS else "other"
        record = Record(
            request_id(headers.get(b"x-request-id")), scope["method"], path,
            {name: headers[name.encode()].decode("latin-1") for name in _TRACE if name.encode() in headers},
        )  # fmt: skip

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        token = CURRENT.set(record)
        try:
            await self.app(scope, receive, noted)
        finally:
            CURRENT.reset(token)
            record.finish()
            if record.generation is not None:
                record.generation.close()
            for listener in self.listeners:
                listener(record)
