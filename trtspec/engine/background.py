"""Requests from any thread or event loop, one thread that runs them, and what each caller holds of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch

from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.errors import EngineError
from trtspec.outputs import CompletionOutput, OutputDelta, RequestOutput, SpeculationStats
from trtspec.sampling_params import SamplingParams

EXIT_SECONDS = 10.0
"""How long an interpreter that ends waits for the step in flight."""

Job = tuple[str | None, Sequence[int], SamplingParams]
"""One prompt: its text if it came as text, its token ids, how to draw."""


class Generation:
    """One prompt on its way: iterate (`for`, `async for`) over its deltas, or wait for the whole output.

    It runs whether or not anybody reads; a reader that is slow or gone delays nobody. Every iteration begins with the
    first delta; leaving one early (break, an exception, cancelling the task) aborts the request. If the engine fails
    or is shut down meanwhile, readers get what came until then and after that EngineError.
    """

    def __init__(self, thread: EngineThread, prompt: str | None, samples: list[Request], keep_deltas: bool) -> None:
        self.request_id = samples[0].request_id
        self.prompt = prompt
        self.samples = samples
        self.done: Future[None] = Future()
        self._thread = weakref.ref(thread)  # who keeps an output does not keep the model
        self._keep_deltas = keep_deltas
        self._num_running = len(samples)
        # No lock: one thread writes, it only appends, and then looks for readers; a reader looks again once it has
        # left its future (_news), so that nothing written meanwhile escapes it. It may be woken once too often.
        self._deltas: list[OutputDelta] = []
        self._readers: deque[Future[None]] = deque()

    def __iter__(self) -> Iterator[OutputDelta]:
        try:
            for seen in itertools.count():
                while (news := self._news(seen)) is not None:
                    news.result()
                if seen == len(self._deltas):
                    return self.done.result()
                yield self._deltas[seen]
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            for seen in itertools.count():
                while (news := self._news(seen)) is not None:
                    await asyncio.wrap_future(news)  # wakes the loop with call_soon_threadsafe
                if seen == len(self._deltas):
                    self.done.result()
                    return
                yield self._deltas[seen]
        finally:
            self.abort()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    async def aresult(self) -> RequestOutput:
        """Wait for the whole output; cancelling this aborts the request. EngineError as above."""
        async for _ in self:
            pass
        return self.result()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output. TimeoutError after `timeout` seconds, and the request goes on. EngineError."""
        try:
            self.done.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(
                f"request {self.request_id} is not finished after {timeout} s; wait on, or abort() it"
            ) from None
        return request_output(self)

    @property
    def speculation(self) -> SpeculationStats:
        """Of all samples, so far; from any thread."""
        return SpeculationStats.total(sample.stats.copy() for sample in self.samples)

    def abort(self) -> None:
        """End it before the next step with what it has, finish_reason "abort". Ignored once it has ended."""
        thread = self._thread()
        if thread is not None:  # the thread's own stack keeps it while anything runs
            thread.abort(self.request_id)

    def put(self, emission: Emission) -> None:
        """For the engine's thread: what a step gave to one of the samples."""
        self._num_running -= emission.request.finished
        if self._keep_deltas:
            self._deltas.append(output_delta(self.request_id, emission))
        if self._num_running == 0:
            self.done.set_result(None)
        self._wake_readers()

    def fail(self, error: EngineError) -> None:
        """For the engine's thread: nothing will come any more."""
        self.done.set_exception(error)
        self._wake_readers()

    def _news(self, seen: int) -> Future[None] | None:
        """What to wait for, and then ask again. None if there are more than `seen` deltas, or there will be none."""
        if self._has_news(seen):
            return None
        news: Future[None] = Future()
        self._readers.append(news)
        return None if self._has_news(seen) else news

    def _has_news(self, seen: int) -> bool:
        return len(self._deltas) > seen or self.done.done()

    def _wake_readers(self) -> None:
        while self._readers:
            reader = self._readers.popleft()
            if reader.set_running_or_notify_cancel():  # False: its task was cancelled
                reader.set_result(None)


class EngineThread:
    """Steps an EngineCore in a thread of its own, which lives as long as there is work.

    Callers leave notes that the thread reads between two steps, so they never wait for a step, nor a step for them.
    While nothing runs there is no thread: torch's worker threads live and die with the thread that calls torch, and a
    second set of them, though idle, slows the first one down. Nor need an idle engine be told that it is not used any
    more.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._submitting = threading.Lock()  # prompts are checked, and numbered in order, without holding up the thread
        self._lock = threading.Lock()  # guards what follows; never held during a step
        self._running: dict[int, Generation] = {}  # by id of each sample that has not ended
        self._added: list[list[Request]] = []
        self._thread: threading.Thread | None = None
        self._closed: str | None = None  # why
        self._cause: BaseException | None = None
        # Without the lock: the garbage collector may close a forgotten loop, which aborts its generation, in any line
        # of any thread, one that is just being started by a holder of the lock included.
        self._aborted: deque[int] = deque()
        _threads.add(self)

    def submit(self, jobs: Iterable[Job], keep_deltas: bool = True) -> list[Generation]:
        """Queue all prompts, or none: RequestError or CapacityError for the first that cannot run. EngineError when
        closed. keep_deltas: False saves their memory where only results are wanted."""
        with self._submitting:
            generations = [
                Generation(self, text, self.engine.make_request(prompt_ids, params), keep_deltas)
                for text, prompt_ids, params in jobs
            ]
            with self._lock:
                if self._closed is not None:
                    raise self._error()
                if self._thread is None and generations:
                    num_threads = torch.get_num_threads()
                    thread = threading.Thread(target=self._run, args=(num_threads,), name="trtspec-engine", daemon=True)
                    thread.start()  # it waits for the lock
                    self._thread = thread
                for generation in generations:
                    self._added.append(generation.samples)
                    self._running.update((sample.request_id, generation) for sample in generation.samples)
        return generations

    @property
    def failure(self) -> BaseException | None:
        """What a step raised, which nothing can follow; None while the engine runs, and after shutdown()."""
        return self._cause

    def abort(self, request_id: int) -> None:
        """End a generation, all its samples, before the next step. Unknown and finished ids are ignored."""
        self._aborted.append(request_id)

    def join(self, timeout: float | None = None) -> None:
        """Wait until nothing runs: the engine may be used directly."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """End what runs after the step in flight, with EngineError; so do later submissions. `timeout` in seconds."""
        with self._lock:
            self._closed = self._closed or "this LLM was shut down; make a new one"
        self.join(timeout)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # partly a property of the calling thread
        try:
            while self._take_notes():
                self._deliver(self.engine.step())
        except BaseException as error:
            self._fail_all(error)

    def _take_notes(self) -> bool:
        """Between two steps: do what callers asked for. False: nothing is left to run, and this thread is over."""
        with self._lock:
            if self._closed is not None:
                raise self._error()
            added, self._added = self._added, []
            wanted = {self._aborted.popleft() for _ in range(len(self._aborted))}
            running = self._running.items() if wanted else ()
            aborted = [sample_id for sample_id, generation in running if generation.request_id in wanted]
        for samples in added:
            self.engine.queue(samples)
        self._deliver(filter(None, map(self.engine.abort, aborted)))
        with self._lock:
            if not self._running and not self.engine.has_work:  # a last step may be in flight
                self._thread = None
            return self._thread is not None

    def _deliver(self, emissions: Iterable[Emission]) -> None:
        for emission in emissions:
            request = emission.request
            with self._lock:
                generation = self._running.get(request.request_id)
                if request.finished:
                    self._running.pop(request.request_id, None)
            # None: somebody else added it to the engine. Nothing is told of a chunk of a prompt that is not the last.
            if generation is not None and (emission.tokens or request.finished):
                generation.put(emission)

    def _fail_all(self, error: BaseException) -> None:
        """A step raised, or shutdown(): end all that runs, and free its blocks as far as the engine still can."""
        with self._lock:
            if self._closed is None:
                self._closed = f"the engine failed and has stopped: {described(error)}; please report this"
                self._cause = error
            running, self._running = self._running, {}
        for sample_id in running:
            with contextlib.suppress(Exception):
                self.engine.abort(sample_id, self._error())
        for generation in dict.fromkeys(running.values()):
            generation.fail(self._error())

    def _error(self) -> EngineError:
        error = EngineError(self._closed)
        error.__cause__ = self._cause
        return error


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """An interpreter must not go while one of its threads is inside torch."""
    for thread in list(_threads):
        thread.shutdown(EXIT_SECONDS)


def output_delta(request_id: int, emission: Emission) -> OutputDelta:
    """What one sample (its id counts on from the first sample's) has got, as it is now."""
    request = emission.request
    return OutputDelta(
        request_id=request_id,
        index=request.request_id - request_id,
        text=emission.text,
        token_ids=tuple(emission.tokens),
        num_accepted_drafts=emission.num_drafts,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=None if request.error is None else described(request.error),
        logprobs=None if emission.logprobs is None else tuple(emission.logprobs),
    )


def request_output(generation: Generation) -> RequestOutput:
    """The public view of one prompt's samples."""
    samples = generation.samples
    return RequestOutput(
        request_id=generation.request_id,
        prompt=generation.prompt,
        prompt_token_ids=samples[0].tokens[: samples[0].prompt_len],
        outputs=[
            CompletionOutput(
                index=index,
                text=sample.shown_text,
                token_ids=sample.output_ids,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                seed=None if sample.sampling.greedy else sample.sampling.seed,
                speculation=sample.stats,
                error=None if sample.error is None else described(sample.error),
                drafter_error=None if sample.drafter_error is None else described(sample.drafter_error),
                logprobs=None if sample.logprobs is None else sample.logprobs.entries,
                cumulative_logprob=None if sample.logprobs is None else sample.logprobs.cumulative,
            )
            for index, sample in enumerate(samples)
        ],
        finished=all(sample.finished for sample in samples),
    )


def described(error: BaseException) -> str:
    """Type and message."""
    return f"{type(error).__name__}: {error}"
