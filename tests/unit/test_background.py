"""The engine's thread under many hurried threads, with a core whose steps cost nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import pytest

from trtspec.engine.background import EngineThread, Generation, wait
from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.errors import EngineError, RequestError
from trtspec.outputs import OutputDelta
from trtspec.sampling_params import RequestSampling, SamplingParams

GREEDY = RequestSampling(True, 0.0, 0, 1.0, 0.0, 0)


class CountingCore:
    """A core in which every request counts 1, 2, 3, ... up to its max_tokens.

    It fails if two threads enter it at once.
    """

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.num_made = 0
        self.running: dict[int, Request] = {}
        self.num_steps = 0

    def make_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        if not prompt_ids:
            raise RequestError("empty")
        assert params.max_tokens is not None
        length = len(prompt_ids) + params.max_tokens
        nothing: frozenset[int] = frozenset()
        self.num_made += params.n
        return [
            Request(i, list(prompt_ids), len(prompt_ids), GREEDY, length, 0, nothing, nothing, False, None)
            for i in range(self.num_made - params.n, self.num_made)
        ]

    def queue(self, samples: list[Request]) -> None:
        self._alone()
        self.running.update((sample.request_id, sample) for sample in samples)
        self.inside.release()

    def step(self) -> list[Emission]:
        self._alone()
        self.num_steps += 1
        emissions = []
        for request in list(self.running.values()):
            token = request.num_output + 1
            request.append([token])
            emissions.append(Emission(request, [token], "", 0, 0, False))
            if request.finished:
                del self.running[request.request_id]
        self.inside.release()
        return emissions

    def abort(self, request_id: int, error: Exception | None = None) -> Emission | None:
        self._alone()
        request = self.running.pop(request_id, None)
        if request is not None:
            request.abort()
        self.inside.release()
        return None if request is None else Emission(request, [], "", 0, 0, False)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def _alone(self) -> None:
        assert self.inside.acquire(blocking=False), "two threads in the core"


@pytest.fixture
def core() -> CountingCore:
    return CountingCore()


@pytest.fixture
def thread(core: CountingCore) -> EngineThread:
    return EngineThread(cast(EngineCore, core))


@pytest.fixture
def hurry() -> Iterator[None]:
    """Make threads switch, and the garbage collector run, as often as possible."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20, 2, 2)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


def submit(thread: EngineThread, max_tokens: int, n: int = 1) -> Generation:
    return thread.submit([(None, [1], SamplingParams(max_tokens=max_tokens, n=n))])[0]


def counted(deltas: Sequence[OutputDelta], n: int = 1) -> list[list[int]]:
    return [[token for delta in deltas if delta.index == index for token in delta.token_ids] for index in range(n)]


def read_in_some_way(thread: EngineThread, rng: random.Random) -> None:
    """Submit one request, read or leave it in a random manner, and check what can be known of its deltas."""
    most, n = rng.randint(1, 8), rng.randint(1, 3)
    whole = [list(range(1, most + 1))] * n
    generation = submit(thread, most, n)
    way = rng.choice(("read", "await", "result", "leave", "forget", "abort"))
    if way == "read":
        assert counted(list(generation), n) == whole
    elif way == "await":

        async def read() -> list[OutputDelta]:
            return [delta async for delta in generation]

        assert counted(asyncio.run(read()), n) == whole
    elif way == "result":
        assert [output.token_ids for output in generation.result().outputs] == whole
    elif way == "abort":
        generation.abort()
        for part in counted(list(generation), n):
            assert part == whole[0][: len(part)]
    elif way == "forget":  # a loop in a reference cycle: the collector closes it, in any thread, at any line
        cycle: list[object] = [iter(generation)]
        next(cast(Iterator[OutputDelta], cycle[0]))
        cycle.append(cycle)
    else:
        for _ in generation:
            break


@pytest.mark.usefixtures("hurry")
def test_hurried_threads_lose_nothing(thread: EngineThread, core: CountingCore) -> None:
    finished = []

    def hurried(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            read_in_some_way(thread, rng)
        finished.append(seed)

    callers = [threading.Thread(target=hurried, args=(seed,), daemon=True) for seed in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(finished) == 8, "some failed, or hang"
    thread.join(60)
    assert not core.running
    assert not thread._running


def test_a_delta_between_looking_and_waiting_is_not_missed(
    thread: EngineThread, core: CountingCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = core.make_request([1], SamplingParams(max_tokens=1))
    core.queue(samples)
    generation = Generation(thread, None, samples, keep_deltas=True)
    look = generation._has_news

    def look_then_step(seen: int) -> bool:
        found = look(seen)
        for emission in core.step():
            generation.put(emission)
        return found

    monkeypatch.setattr(generation, "_has_news", look_then_step)
    assert generation._news(0) is None


def test_the_collector_may_close_a_forgotten_loop_in_any_line(thread: EngineThread) -> None:
    """The garbage collector may close a forgotten loop even while its thread holds the engine thread's lock."""

    def collect() -> None:
        with thread._lock:
            gc.collect()

    generation = submit(thread, 10**9)
    cycle: list[object] = [iter(generation)]
    next(cast(Iterator[OutputDelta], cycle[0]))
    cycle.append(cycle)
    del cycle
    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    assert generation.result(timeout=30).outputs[0].finish_reason == "abort"


def test_requests_are_queued_in_the_order_of_their_ids(thread: EngineThread, core: CountingCore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: submit(thread, 3).result(), range(200)))
        queued: list[int] = []
        queue = core.queue
        core.queue = lambda samples: (queued.append(samples[0].request_id), queue(samples))[1]  # type: ignore[method-assign]
        list(pool.map(lambda _: submit(thread, 3).result(), range(200)))
    assert queued == list(range(200, 400))


def test_all_or_nothing(thread: EngineThread, core: CountingCore) -> None:
    with pytest.raises(RequestError):
        thread.submit([(None, [1], SamplingParams()), (None, [], SamplingParams())])
    thread.join()
    assert core.num_steps == 0


def test_nothing_to_do_starts_no_thread(thread: EngineThread) -> None:
    assert thread.submit([]) == []
    assert thread._thread is None


def test_without_deltas_there_is_only_the_result(thread: EngineThread) -> None:
    (generation,) = thread.submit([(None, [1], SamplingParams(max_tokens=5))], keep_deltas=False)
    assert generation.result().outputs[0].token_ids == [1, 2, 3, 4, 5]
    assert generation._deltas == []


def test_shutdown_while_many_submit(thread: EngineThread, core: CountingCore) -> None:
    """Each submission is refused, ends with an error or completes; none hangs."""

    def ended(_: int) -> bool:
        try:
            submit(thread, 10_000).result(timeout=60)
        except EngineError:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        ends = [pool.submit(ended, i) for i in range(40)]
        thread.shutdown()
        assert True in [end.result() for end in ends]
    assert not core.running


def test_many_deltas_are_read_in_linear_time_and_leave_no_futures(thread: EngineThread) -> None:
    generation = submit(thread, 2000)
    generation.result()
    assert len(list(generation)) == 2000
    assert len(generation._readers) == 0


def _wait_until_alarm(seconds: float) -> None:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.01)  # and every 10 ms, if the first came before the wait
        wait(Future())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_an_interrupt_at_any_moment_of_waiting_is_a_keyboard_interrupt() -> None:
    """Future.result() raised RuntimeError for 25 of 2,000 such interrupts. 1,000 of them miss that with 4e-6."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    generator = random.Random(1)
    try:
        for _ in range(1000):
            with pytest.raises(KeyboardInterrupt):
                _wait_until_alarm(generator.uniform(1e-6, 3e-5))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_waiting_ends_with_the_future_or_after_the_time_given() -> None:
    future: Future[None] = Future()
    assert not wait(future, 0.001)
    assert not wait(future, -1)
    threading.Timer(0.01, future.set_exception, [EngineError("failed")]).start()
    assert wait(future, 30)
    assert wait(future)
