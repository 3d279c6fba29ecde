"""Checks that every request passes before it is read: API keys, and limits on its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtspec.serve.http.api_errors import ApiError, response
from trtspec.serve.http.metrics import HTTPMetrics
from trtspec.serve.http.request_log import ENDPOINTS


class Gate:
    """An ASGI middleware: API keys for /v1, limits on bodies (bytes, seconds), and a count of answers by status.

    It compares a key's digest with those of all keys, even after a match, so that the time reveals nothing.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], max_body: int, seconds: float, metrics: HTTPMetrics
    ) -> None:
        self.app = app
        self.max_body = max_body
        self.seconds = seconds
        self.metrics = metrics
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, headers = scope["path"], dict(scope["headers"])
        sent = 0

        async def counted(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
                endpoint = path if path in ENDPOINTS else "other"
                self.metrics.requests.labels(endpoint, str(sent)).inc()
            await send(message)

        read, more = 0, True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds

        async def limited() -> Message:
            nonlocal read, more
            try:
                message = await asyncio.wait_for(receive(), end - loop.time() if more else None)
            except asyncio.TimeoutError:
                raise self._too_slow() from None
            more = message.get("more_body", False)
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self.max_body:
                    raise self._too_large()
            return message

        try:
            if path.startswith("/v1") and scope["method"] != "OPTIONS":
                self.check_key(headers.get(b"authorization", b""))
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > self.max_body:
                raise self._too_large()
            await self.app(scope, limited, counted)
        except ApiError as error:
            if not sent:
                await response(error)(scope, receive, counted)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body} bytes", code="body_too_large")

    def _too_slow(self) -> ApiError:
        why = f"the body did not come within {self.seconds:g} s"
        return ApiError(408, why, code="body_timeout", headers={"Connection": "close"})

    def check_key(self, header: bytes) -> None:
        """Check an Authorization header. ApiError if the server has keys and the header holds none of them."""
        if not self._digests:
            return
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
