"""Runs requests from any thread or event loop in one engine thread. A Generation is the caller's view of one prompt."""

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
from typing import Any

import torch

from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.errors import EngineError
from trtspec.outputs import CompletionOutput, OutputDelta, RequestOutput, SpeculationStats
from trtspec.sampling_params import SamplingParams

EXIT_SECONDS = 10.0
"""Time that an ending interpreter waits for the step in flight."""

Job = tuple[str | None, Sequence[int], SamplingParams]
"""One prompt: its text (None: it came as token ids), its token ids, its sampling parameters."""


class Generation:
    """One prompt that is being generated: iterate (`for`, `async for`) over its deltas, or wait for the whole output.

    It runs whether or not it is read; a slow or absent reader delays no one. Every iteration begins with the first
    delta. Leaving an iteration early (break, an exception, cancelling the task) aborts the request. If the engine fails
    or is shut down meanwhile, readers get the deltas so far and then EngineError.
    """

    def __init__(self, thread: EngineThread, prompt: str | None, samples: list[Request], keep_deltas: bool) -> None:
        self.request_id = samples[0].request_id
        self.prompt = prompt
        self.samples = samples
        self.done: Future[None] = Future()
        self._thread = weakref.ref(thread)  # weak: keeping an output does not keep the model
        self._keep_deltas = keep_deltas
        self._num_running = len(samples)
        # These need no lock. One thread writes: it only appends, and then wakes the readers. A reader checks for deltas
        # again after it has queued its future (_news), so it misses none. It may be woken once too often.
        self._deltas: list[OutputDelta] = []
        self._readers: deque[Future[None]] = deque()

    def __iter__(self) -> Iterator[OutputDelta]:
        try:
            for seen in itertools.count():
                while (news := self._news(seen)) is not None:
                    wait(news)
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
        """Wait for the whole output.

        Cancelling this aborts the request. EngineError if the engine fails or is shut down.
        """
        async for _ in self:
            pass
        return self.result()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output.

        TimeoutError after `timeout` seconds; the request goes on. EngineError as in aresult.
        """
        if not wait(self.done, timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s; wait on, or abort() it")
        self.done.result()
        return request_output(self)

    @property
    def speculation(self) -> SpeculationStats:
        """Counts over all samples so far. May be read from any thread."""
        return SpeculationStats.total(sample.stats.copy() for sample in self.samples)

    def abort(self) -> None:
        """End the request before the next step, with its output so far and finish_reason "abort".

        Ignored once it has ended.
        """
        thread = self._thread()
        if thread is not None:  # None: nothing runs, as a running thread refers to it
            thread.abort(self.request_id)

    def put(self, emission: Emission) -> None:
        """Add the emission of a step for one of the samples. Only the engine's thread calls this."""
        self._num_running -= emission.request.finished
        if self._keep_deltas:
            self._deltas.append(output_delta(self.request_id, emission))
        if self._num_running == 0:
            self.done.set_result(None)
        self._wake_readers()

    def fail(self, error: EngineError) -> None:
        """End with an error: no more deltas will come. Only the engine's thread calls this."""
        self.done.set_exception(error)
        self._wake_readers()

    def _news(self, seen: int) -> Future[None] | None:
        """A future to wait for before the next call. None: there are more than `seen` deltas, or no more will come."""
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
    """A thread that steps an EngineCore, and lives as long as there is work.

    Callers queue notes that the thread reads between two steps. So callers never wait for a step, nor a step for them.
    While nothing runs there is no thread. torch's worker threads live and die with the thread that calls torch, and a
    second set of them slows the first one down even if idle. Besides, an engine without a thread need not be stopped
    when it is no longer used.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._submitting = threading.Lock()  # guards the checks and the numbering of prompts; never delays the thread
        self._lock = threading.Lock()  # guards the fields below; never held during a step
        self._running: dict[int, Generation] = {}  # by id of each sample that has not ended
        self._added: list[list[Request]] = []
        self._thread: threading.Thread | None = None
        self._closed: str | None = None  # the reason; None: open
        self._cause: BaseException | None = None
        # Not guarded by the lock. The garbage collector may close a forgotten iteration, which aborts its generation,
        # at any line of any thread. That thread may be one that a holder of the lock is just starting.
        self._aborted: deque[int] = deque()
        _threads.add(self)

    def submit(self, jobs: Iterable[Job], keep_deltas: bool = True) -> list[Generation]:
        """Queue all prompts, or none.

        Raises RequestError or CapacityError for the first prompt that cannot run, EngineError if closed.
        keep_deltas: False saves the memory of the deltas if only results are wanted.
        """
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
                    thread.start()  # the new thread first waits for the lock
                    self._thread = thread
                for generation in generations:
                    self._added.append(generation.samples)
                    self._running.update((sample.request_id, generation) for sample in generation.samples)
        return generations

    @property
    def failure(self) -> BaseException | None:
        """Exception of the step that ended the engine. None while the engine runs, and after shutdown()."""
        return self._cause

    def abort(self, request_id: int) -> None:
        """End all samples of a generation before the next step. Unknown and finished ids are ignored."""
        self._aborted.append(request_id)

    def join(self, timeout: float | None = None) -> None:
        """Wait until nothing runs. Then the engine may be used directly."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """End all generations with EngineError after the step in flight.

        Later submissions raise it, too. `timeout` in seconds.
        """
        with self._lock:
            self._closed = self._closed or "this LLM was shut down; make a new one"
        self.join(timeout)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # partly a setting of the calling thread
        try:
            while self._take_notes():
                self._deliver(self.engine.step())
        except BaseException as error:
            self._fail_all(error)

    def _take_notes(self) -> bool:
        """Do what callers asked for since the last step. False: nothing is left to run, and this thread ends."""
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
            # None: the request was added to the engine directly. A chunk of a prompt that is not the last has no delta.
            if generation is not None and (emission.tokens or request.finished):
                generation.put(emission)

    def _fail_all(self, error: BaseException) -> None:
        """End all generations, after a step raised or shutdown(). Free their blocks as far as the engine still can."""
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
    """Stop all engine threads. The interpreter must not end while one of its threads is inside torch."""
    for thread in list(_threads):
        thread.shutdown(EXIT_SECONDS)


def output_delta(request_id: int, emission: Emission) -> OutputDelta:
    """Public view of a sample's emission and present state. request_id: id of the first sample; the others count on."""
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
    """Public view of one prompt's samples."""
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


def wait(future: Future[None], timeout: float | None = None) -> bool:
    """Wait until a future is done. False: it is not done after `timeout` seconds (None: any time).

    Ctrl-C ends this with KeyboardInterrupt. Future.result() would now and then raise RuntimeError instead: an interrupt
    just after threading.Condition has released its lock keeps it from taking the lock again.
    """
    done = threading.Lock()
    done.acquire()
    future.add_done_callback(lambda _: done.release())
    return done.acquire(timeout=-1 if timeout is None else max(timeout, 0))


def described(error: BaseException) -> str:
    """Type and message of an error."""
    return f"{type(error).__name__}: {error}"
