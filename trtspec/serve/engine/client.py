"""The front's hold on the engine's process: start it, talk to it, start it again when it dies."""

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
"""Seconds between an engine's death and its next start; doubled while engines die young."""
YOUNG = 20.0
"""Seconds: an engine that was ready for longer died of something else than its start."""


GONE = "the engine has ended; the request is lost, send it again"
STOPPING = "the server is shutting down; the request is lost, send it again"


class RefusedError(Exception):
    """The engine cannot run a request; `kind` is the name of the error in trtspec.errors that says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Stream:
    """What comes for some prompts that were submitted together, until all of their samples have ended. Nobody waits for
    a reader."""

    def __init__(self, client: EngineClient, request_ids: range, n: int) -> None:
        self.request_ids = request_ids  # of the prompts, in order
        self.n = n  # samples of each
        self.num_samples = self.num_running = len(request_ids) * n
        self._client = client
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def read(self) -> list[Delta]:
        """All that has come since the last call; waits while there is nothing, and is empty at the end. EngineError if
        the engine has gone, RefusedError if it cannot run a prompt, what end() was given; not before what came until
        then is read."""
        await self._news.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        if not self.ended:
            self._news.clear()
        return deltas

    def choice(self, delta: Delta) -> int:
        """Which of all samples it is of: prompt by prompt."""
        return (delta.request - self.request_ids.start) * self.n + delta.sample

    @property
    def ended(self) -> bool:
        return self.num_running == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        """For the client."""
        self._deltas.append(delta)
        self.num_running -= delta.finish_reason is not None
        self._news.set()

    def end(self, error: Exception) -> None:
        """Stop it all; readers get what has come, then the error. Ignored once it has ended."""
        if not self.ended:
            self._error = error
            self._news.set()
            self._client.forget(self)

    def close(self) -> None:
        """What has come is not held any more either."""
        self.end(EngineError("closed"))
        self._client.release(self)


class EngineClient:
    """One engine, in a process of its own. All methods are for one event loop.

    options: arguments of LLM, as JSON can write them. log: format and level of the engine's log, see logs.configure.
    silence_limit: seconds; an engine that has work and sends nothing for so long is killed. on_restart: called after an
    engine has died.
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
        self.why: str | None = None  # the last engine ended, as anybody may know it; None: none has
        self.pid: int | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self._last_words: str | None = None  # of the engine that runs, on why it ends: for the log
        self._ready_since: float | None = None  # the engine that runs; time.monotonic(), as is:
        self._owes_since: float | None = None  # it a word; None: it does not
        self._streams: dict[int, Stream] = {}  # that have not ended
        self._open: set[Stream] = set()  # that are not closed
        self._next_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Returns when requests can be submitted. ConfigError if the model cannot be loaded, EngineError if the engine
        dies before it is ready."""
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self._first_start
        except BaseException:
            await self.close()
            raise

    def submit(self, prompts: Sequence[Sequence[int]], params: dict[str, Any]) -> Stream:
        """Start a request; params: fields of SamplingParams, for each prompt. EngineError while there is no engine."""
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
        """Nobody waits for it any more: the engine ends what is left of it."""
        for request_id in stream.request_ids:
            if self._streams.pop(request_id, None) is not None and self.state == "ready":
                self._tell({"abort": request_id})

    def release(self, stream: Stream) -> None:
        """It does not count any more."""
        self._open.discard(stream)

    @property
    def num_samples(self) -> int:
        """In flight: that run, wait, or belong to a request whose client has not got all of the answer."""
        return sum(stream.num_samples for stream in self._open)

    @property
    def silence(self) -> float:
        """Seconds since the engine's last word, if it has work."""
        return 0.0 if self._owes_since is None else time.monotonic() - self._owes_since

    def end_all(self) -> None:
        """What runs has had its time."""
        for stream in set(self._streams.values()):
            stream.end(EngineError(STOPPING))

    async def close(self) -> None:
        """End the engine, and what it runs."""
        self.state = "closed"
        if self._supervisor is None:
            return
        if self._writer is not None:
            self._writer.close()
        else:  # it waits to start an engine, or is about to
            self._supervisor.cancel()
        await asyncio.wait([self._supervisor])

    @property
    def _age(self) -> float:
        """Seconds since the engine that runs, or ran last, was ready; 0 if it has never been."""
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def _tell(self, message: dict[str, Any]) -> None:
        """The engine answers whatever it is told, be it with a step that gave nothing."""
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
        """One life of an engine's process; its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            # in a session of its own: Ctrl-C in a terminal is for the front alone
            process = await asyncio.create_subprocess_exec(
                *self.command, str(theirs.fileno()), *self.log,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        watch = asyncio.create_task(self._watch(process))
        try:
            self._writer.write(encode(self.options))
            # the engine may die with a line half written, which is no message
            with suppress(ConnectionError):
                while (line := await reader.readline()).endswith(b"\n"):
                    self._take(json.loads(line))
        finally:
            # at once: until the process itself has gone, seconds may pass
            watch.cancel()
            self._writer.close()
            if self.state != "closed":
                self.state = "restarting"
            self.load, self._owes_since = EngineLoad(), None
            for stream in set(self._streams.values()):
                stream.end(EngineError(STOPPING if self.state == "closed" else GONE))
            # one that is still loading does not see that nobody wants it any more
            seconds = 0 if self.state == "closed" and not self._age else 10
            try:
                await asyncio.wait_for(process.wait(), seconds)
            except asyncio.TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
            status = await process.wait()
        return status

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills an engine that hangs; what follows is as if it had died."""
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
