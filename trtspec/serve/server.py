"""Run the server: the front in this process, the engine in another."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from trtspec.hub.folders import checkpoint_folder
from trtspec.serve import logs
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.http.request_log import RequestLog, write
from trtspec.serve.http.routes import build_app
from trtspec.serve.http.security import Gate
from trtspec.serve.http.service import Service
from trtspec.serve.http.stalled_clients import StalledClients
from trtspec.serve.http.stats_log import write_stats
from trtspec.serve.http.tracing import Tracing, from_environment
from trtspec.serve.settings import ServeSettings
from trtspec.text import Tokenizer

logger = logging.getLogger(__name__)

_LAST_WORDS = 2
"""Seconds for clients to receive the error with which their request ends when the server stops."""
_SPARE = 256
"""Connections beyond those whose samples run or wait: clients that will get 429, viewers, probes."""


def serve(settings: ServeSettings, options: dict[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Once requests can run, the log names the address; connections are refused until then.
    options: arguments of LLM, as values that JSON can represent.
    Raises ConfigError or EngineError if the model cannot be loaded, OSError if the address is taken.
    """
    logs.configure(settings.log_format, settings.log_level)
    tracing = from_environment()
    with _bound(settings.host, settings.port) as listener:
        try:
            return asyncio.run(_serve(settings, options, listener, tracing))
        except asyncio.CancelledError:  # stopped while the model was loading
            return 0


async def _serve(
    settings: ServeSettings, options: dict[str, Any], listener: socket.socket, tracing: Tracing | None
) -> int:
    task = asyncio.current_task()
    assert task is not None
    # This handler applies until the HTTP server installs its own. Process 1 of a container has no default handler,
    # so SIGTERM could not stop it otherwise.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    client = EngineClient(options, (settings.log_format, settings.log_level), settings.engine_timeout)
    starting = asyncio.create_task(client.start())  # in parallel with the lines below: both take a second
    try:
        await asyncio.sleep(0)
        if named := options.get("tokenizer"):
            tokenizer: Tokenizer | None = Tokenizer.named(named)
        else:
            tokenizer = Tokenizer.from_folder(checkpoint_folder(settings.model, revision=options.get("revision")))
        service = Service(settings, client, tokenizer)
        client.on_restart = service.metrics.restarts.inc
        stalled_clients = StalledClients(guarded(service, tracing), settings.client_timeout)
        server = _Server(service, _config(service, stalled_clients))
        await starting
        server.config.limit_concurrency = service.info.max_batch_size + settings.max_queue + _SPARE
        listener.listen(2048)
        host, port = listener.getsockname()[:2]
        warn_if_open(host, settings)
        logger.info("serving %s at http://%s:%d", service.name, f"[{host}]" if ":" in host else host, port)
        watch = stalled_clients.watch(server.server_state.connections)
        background_tasks: list[asyncio.Task[None]] = [asyncio.create_task(watch)]
        if not settings.disable_log_stats:
            background_tasks.append(asyncio.create_task(write_stats(service)))
        await server.serve(sockets=[listener])
        for task in background_tasks:
            task.cancel()
        logger.info("stopped")
    finally:
        starting.cancel()
        await client.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    return 0


class _Server(uvicorn.Server):
    """A uvicorn server that stops gracefully on SIGTERM and SIGINT: no new requests, and those in flight may end.

    A second signal stops it at once. Unlike with uvicorn.Server, the process goes on afterwards, to end the engine.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT on the event loop; overrides uvicorn.Server."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.handle_exit, sign, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or stop at once on a second signal; overrides uvicorn.Server."""
        if not self.should_exit:
            asyncio.get_running_loop().call_later(self._service.settings.drain, self._service.client.end_all)
        self.force_exit = self.should_exit
        self.should_exit = self._service.stopping = True


def _config(service: Service, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # uvicorn's events go to the server's own log
        log_level="warning",
        access_log=False,
        lifespan="off",
        http="httptools",  # StalledClients knows its connections, and no others
        ws="none",
        # After the drain, streams end with an error. Requests that still run _LAST_WORDS seconds later are cut off.
        timeout_graceful_shutdown=math.ceil(service.settings.drain) + _LAST_WORDS,
        server_header=False,
    )


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that readiness probes are refused rather than left waiting."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror} (while attempting to bind on address {(host, port)})") from None
    return bound


def warn_if_open(host: str, settings: ServeSettings) -> None:
    """Log a warning if others can reach this address and need no key."""
    if not settings.api_keys and not ipaddress.ip_address(host).is_loopback:
        logger.warning("there is no API key: whoever reaches %s can generate", host)


def guarded(service: Service, tracing: Tracing | None = None) -> ASGIApp:
    """The app inside its gate, and outermost the log that records every request."""
    settings = service.settings
    app: ASGIApp = Gate(
        build_app(service), settings.api_keys, settings.max_body, settings.client_timeout, service.metrics
    )
    if settings.cors:
        app = CORSMiddleware(app, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
    return RequestLog(app, (write,) if tracing is None else (write, tracing))
