"""Timeouts for clients that stall: clients that connect and send no request, or that do not read their answer.

The HTTP server would wait for such clients for ever, and hold the data that they do not take. The time for sending a
body is limited elsewhere, by Gate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PIECE = 1 << 16
"""Bytes that are sent at once; a client must take each such piece in time."""
_SINCE = "trtspec.sending_since"


class StalledClients:
    """An ASGI middleware around all others, which also watches the server's connections.

    It cuts off a connection if for `limit` seconds it has no complete request, or does not take what is being sent. To
    the app, such a client has hung up. A connection whose request is being computed is not cut off. A client that sends
    its next request before it has the answer is: uvicorn then shows only the newest request.
    """

    def __init__(self, app: ASGIApp, limit: float) -> None:
        self.app = app
        self.limit = limit
        self._still: dict[
            Any, tuple[tuple[Any, int], float]
        ] = {}  # connection without a request -> (state, since when)
        self._running: dict[Any, Any] = {}  # transport -> uvicorn's cycle of the request that runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            """Note when `send` begins: it waits until the client has taken all earlier data but some 64 KiB."""
            scope[_SINCE] = time.monotonic()
            try:
                await send(message)
            finally:
                del scope[_SINCE]

        async def in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            last = max(len(body) - 1, 0) // PIECE * PIECE
            for start in range(0, last, PIECE):
                await timed({**message, "body": body[start : start + PIECE], "more_body": True})
            await timed({**message, "body": body[last:]} if last else message)

        cycle = getattr(receive, "__self__", None)
        transport = getattr(cycle, "transport", None)
        self._running[transport] = cycle
        try:
            await self.app(scope, receive, in_pieces)
        finally:
            if self._running.get(transport) is cycle:
                del self._running[transport]

    async def watch(self, connections: Collection[Any]) -> NoReturn:
        """Sweep until cancelled. connections: uvicorn's own collection, which changes as connections come and go."""
        while True:
            await asyncio.sleep(min(self.limit / 4, 1.0))
            self.sweep(connections, time.monotonic())

    def sweep(self, connections: Collection[Any], now: float) -> None:
        """Cut off the connections whose time is up."""
        still = {}
        for connection in list(connections):
            cycle, transport = connection.cycle, connection.transport
            if connection.pipeline:
                logger.info("a client that sends requests without waiting for answers is cut off")
                transport.abort()
                continue
            if cycle is not None and not cycle.response_complete and not transport.is_closing():
                since = cycle.scope.get(_SINCE, now)
            else:
                state = cycle, transport.get_write_buffer_size()  # its last request, bytes of the answer not taken
                before, since = self._still.get(connection, (state, now))
                since = since if state == before else now
                still[connection] = state, since
            if now - since > self.limit:
                logger.info("a client that neither sends nor reads is cut off")
                transport.abort()
        self._still = still
        for transport, cycle in self._running.items():
            if transport is not None and transport.is_closing() and not cycle.disconnected:
                cycle.disconnected = True  # the app is told, as uvicorn tells it for the newest request alone
                cycle.message_event.set()
