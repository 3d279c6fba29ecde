"""The front's client of the engine's process: it starts the process, talks to it, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from trtspec.errors import ConfigError, EngineError
from trtspec.serve.engine.wire import MAX_LINE, Delta, EngineInfo, EngineLoad, encode

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "closed"]

FIRST_DELAY, MAX_DELAY = 0.1, 10.0
"""Seconds from an engine's death to the next start: the first and the longest. They double while engines die young."""
YOUNG = 20.0
"""Seconds; an engine that was ready for longer did not die because of its start."""


GONE = "the engine has ended; the request is lost, send it again"
STOPPING = "the server is shutting down; the request is lost, send it again"


class RefusedError(Exception):
    """An error of a request that the engine cannot run. kind: name of the error in trtspec.errors that says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Stream:
    """A stream of deltas for prompts that were submitted together; it ends when all of their samples have ended.

    Neither the client nor the engine waits for a reader.
    """

    def __init__(self, client: EngineClient, request_ids: range, n: int) -> None:
        self.request_ids = request_ids  # one for each prompt, in order
        self.n = n  # samples of each prompt
        self.num_samples = self.num_running = len(request_ids) * n
        self._client = client
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def read(self) -> list[Delta]:
        """Return the deltas that came since the last call, or wait for the next; return none at the end.

        Raises EngineError if the engine has gone, RefusedError if the engine cannot run a prompt, or the error that
        end() was given. Deltas that came before the error are returned first.
        """
        await self._news.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        if not self.ended:
            self._news.clear()
        return deltas

    def choice(self, delta: Delta) -> int:
        """Index of a delta's sample among all samples of the stream, counted prompt by prompt."""
        return (delta.request - self.request_ids.start) * self.n + delta.sample

    @property
    def ended(self) -> bool:
        return self.num_running == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        """Add a delta; only the client calls this."""
        self._deltas.append(delta)
        self.num_running -= delta.finish_reason is not None
        self._news.set()

    def end(self, error: Exception) -> None:
        """Stop all requests of the stream; readers get the deltas so far, then the error. Ignored once it has ended."""
        if not self.ended:
            self._error = error
            self._news.set()
            self._client.forget(self)

    def close(self) -> None:
        """End and release the stream: its deltas are no longer held, its samples no longer in flight."""
        self.end(EngineError("closed"))
        self._client.release(self)


class EngineClient:
    """A client of one engine, which runs in a process of its own. All methods must be called on one event loop.

    options: arguments of LLM, as values that JSON can represent. log: format and level of the engine's log, as in
    logs.configure. silence_limit: seconds; an engine that has work and sends nothing for so long is killed.
    on_restart: called after an engine has died.
    """

    command = (sys.executable, "-m", "trtspec.serve.engine.process")

    def __init__(
        self, options: dict[str, Any], log: tuple[str, str] = ("text", "info"), silence_limit: float = math.inf
    ) -> None:
        self.options = options
        self.log = log
        self.silence_limit = silence_limit
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.why: str | None = None  # why the last engine ended, in words that clients may see; None: none has ended
        self.pid: int | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self._last_words: str | None = None  # why the current engine ends, for the log
        self._ready_since: float | None = None  # time.monotonic() when the current engine became ready
        self._owes_since: float | None = (
            None  # time.monotonic() since when the engine owes a message; None: it owes none
        )
        self._streams: dict[int, Stream] = {}  # streams that have not ended, by request id
        self._open: set[Stream] = set()  # streams that are not closed
        self._next_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start the engine; return when requests can be submitted.

        Raises ConfigError if the model cannot be loaded, EngineError if the engine dies before it is ready.
        """
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self._first_start
        except BaseException:
            await self.close()
            raise

    def submit(self, prompts: Sequence[Sequence[int]], params: dict[str, Any]) -> Stream:
        """Start a request for several prompts. params: fields of SamplingParams, which apply to each prompt.

        Raises EngineError while there is no engine.
        """
        if self._writer is None or self.state != "ready":
            raise EngineError(f"the engine is {self.state}; try again in a moment")
        ids = range(self._next_id, self._next_id + len(prompts))
        self._next_id = ids.stop
        stream = Stream(self, ids, params.get("n", 1))
        self._open.add(stream)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._streams[request_id] = stream
            self._tell({"submit": request_id, "prompt": prompt, "params": params})
        return stream

    def forget(self, stream: Stream) -> None:
        """Stop delivering to a stream that no reader needs any more; the engine aborts its unfinished requests."""
        for request_id in stream.request_ids:
            if self._streams.pop(request_id, None) is not None and self.state == "ready":
                self._tell({"abort": request_id})

    def release(self, stream: Stream) -> None:
        """Stop counting a stream's samples as in flight."""
        self._open.discard(stream)

    @property
    def num_samples(self) -> int:
        """Samples in flight: those that run, wait, or belong to a request whose client lacks part of the answer."""
        return sum(stream.num_samples for stream in self._open)

    @property
    def silence(self) -> float:
        """Seconds since the engine's last message if it has work, else 0."""
        return 0.0 if self._owes_since is None else time.monotonic() - self._owes_since

    def end_all(self) -> None:
        """End all running streams with EngineError, because the server is shutting down."""
        for stream in set(self._streams.values()):
            stream.end(EngineError(STOPPING))

    async def close(self) -> None:
        """End the engine and all requests that it runs."""
        self.state = "closed"
        if self._supervisor is None:
            return
        if self._writer is not None:
            self._writer.close()
        else:  # the supervisor waits to start an engine, or is about to start one
            self._supervisor.cancel()
        await asyncio.wait([self._supervisor])

    @property
    def _age(self) -> float:
        """Seconds since the current or last engine became ready; 0 if it was never ready."""
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to the engine. It answers every message, if need be with a step without deltas."""
        assert self._writer is not None
        self._writer.write(encode(message))
        if self._owes_since is None:
            self._owes_since = time.monotonic()

    async def _supervise(self) -> None:
        delay = FIRST_DELAY
        while True:
            self._last_words = self._ready_since = None
            try:
                self.why = f"exit status {await self._run()}"
            except Exception:
                logger.exception("the engine's process cannot be run")
                self.why = "it cannot be run"
            self._writer = self.pid = None
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_exception(EngineError(f"the engine did not start: {self.why}"))
            if self.state == "closed":
                return
            self.on_restart()
            if self._age > YOUNG:
                delay = FIRST_DELAY
            words = self.why if self._last_words is None else f"{self.why}: {self._last_words}"
            logger.error("the engine has ended (%s); another is started in %.1f s", words, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    async def _run(self) -> int:
        """Run an engine's process until it ends; return its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            # in a session of its own, so that Ctrl-C in a terminal reaches only the front
            process = await asyncio.create_subprocess_exec(
                *self.command, str(theirs.fileno()), *self.log,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        watch = asyncio.create_task(self._watch(process))
        try:
            self._writer.write(encode(self.options))
            # the engine may die in the middle of a line; half a line is not a message
            with suppress(ConnectionError):
                while (line := await reader.readline()).endswith(b"\n"):
                    self._take(json.loads(line))
        finally:
            # do this at once, because the process itself may take seconds to end
            watch.cancel()
            self._writer.close()
            if self.state != "closed":
                self.state = "restarting"
            self.load, self._owes_since = EngineLoad(), None
            for stream in set(self._streams.values()):
                stream.end(EngineError(STOPPING if self.state == "closed" else GONE))
            # an engine that is still loading does not notice that the socket is closed
            seconds = 0 if self.state == "closed" and not self._age else 10
            try:
                await asyncio.wait_for(process.wait(), seconds)
            except asyncio.TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
            status = await process.wait()
        return status

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that hangs; it is then handled like one that died."""
        while self.silence < self.silence_limit:
            await asyncio.sleep(min(self.silence_limit / 8, 1.0))
        self._last_words = f"it had work and said nothing for {self.silence:.1f} s"
        with suppress(ProcessLookupError):
            process.kill()

    def _take(self, message: dict[str, Any]) -> None:
        for fields in message.get("deltas", ()):
            delta = Delta(*fields)
            stream = self._streams.get(delta.request)
            if stream is not None:
                stream.put(delta)
                if stream.ended:
                    self._drop(stream)
        self._owes_since = time.monotonic() if self._streams else None
        if "load" in message:
            self.load = EngineLoad(**message["load"])
        elif "refused" in message:
            refused = self._streams.pop(message["refused"], None)
            if refused is not None:
                refused.end(RefusedError(message["kind"], message["why"]))
        elif "ready" in message:
            self.info = EngineInfo(**message["ready"])
            logger.info("the engine is ready", extra={"fields": {"pid": self.pid, **message["ready"]}})
            self._ready_since = time.monotonic()
            if self.state != "closed":
                self.state = "ready"
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_result(None)
        elif "unusable" in message:
            self._last_words = message["unusable"]
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_exception(ConfigError(message["unusable"]))
        elif "failed" in message:
            self._last_words = message["failed"]

    def _drop(self, stream: Stream) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
