"""Endings among many callers: readers that leave or abort, Ctrl-C, failed launches, a broken engine, and shutdown.

Each output until then is compared with the output of plain offline decoding for the same prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import async_cases
from tests.e2e.async_cases import (
    LIMITS,
    LONG,
    MEDIUM,
    POISON,
    SHORT,
    assert_all_over,
    before_each_launch,
    joined,
    offline,
)
from tests.e2e.tiny import VOCAB, assert_all_blocks_free
from trtspec import LLM, Generation, OutputDelta, RequestOutput
from trtspec.core import StepInputs
from trtspec.errors import CapacityError, EngineError, RequestError

llm = async_cases.llm
short = async_cases.short


# -- leaving early -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_abort_from_another_thread(llm: LLM, n: int) -> None:
    generation = llm.generate_async([1, 2, 3], dataclasses.replace(LONG, n=n))
    threading.Timer(0.05, generation.abort).start()
    assert {sample.finish_reason for sample in generation.result().outputs} == {"abort"}
    assert joined(generation, n) == offline(generation.result())
    assert_all_over(llm, abort=n)


def test_abort_by_id_after_the_first_sample_has_ended(llm: LLM) -> None:
    """The request's id aborts its other sample, although it is also the id of its first sample, which has ended."""
    text = llm.generate([1, 2, 3], MEDIUM)[0].outputs[0].text
    params = dataclasses.replace(LONG, n=2, stop=text[:10])  # the other sample has another text
    generation = llm.generate_async([1, 2, 3], params)
    for delta in generation:
        if delta.index == 0 and delta.finished:
            llm.abort(generation.request_id)
    assert [sample.finish_reason for sample in generation.result().outputs] == ["stop", "abort"]


def test_abort_hands_out_what_was_held_back(llm: LLM) -> None:
    """An abort returns the text that was held back. All of it was, as it may be the beginning of the stop string."""
    before_each_launch(llm, lambda inputs: time.sleep(0.02))
    (output,) = llm.generate([1, 2, 3], dataclasses.replace(LONG, max_tokens=30))
    text = output.outputs[0].text
    generation = llm.generate_async([1, 2, 3], dataclasses.replace(LONG, max_tokens=30, stop=text + "never"))
    first = next(iter(generation))  # and leave
    sample = joined(generation)[0]
    assert first.text == ""
    assert (sample.finish_reason, sample.text != "") == ("abort", True)
    assert text.startswith(sample.text)


async def leave_by_break(llm: LLM) -> None:
    async for _ in llm.generate_async([1, 2, 3], LONG):
        break


async def leave_by_exception(llm: LLM) -> None:
    async def reads() -> None:
        async for _ in llm.generate_async([1, 2, 3], LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await reads()


async def leave_by_cancel(llm: LLM) -> None:
    async def reads() -> None:
        async for _ in llm.generate_async([1, 2, 3], LONG):
            first.set()

    first = asyncio.Event()
    task = asyncio.create_task(reads())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(llm: LLM) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(llm.generate_async([1, 2, 3], LONG).aresult(), 0.05)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_cancel, leave_by_timeout])
def test_a_loop_that_is_left_aborts_its_request(llm: LLM, leave: Callable[[LLM], Any]) -> None:
    async def leaves_and_lives() -> None:
        await leave(llm)
        while llm.get_metrics().finished != {"abort": 1}:  # the loop goes on, so not only the end of the loop aborts
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leaves_and_lives(), 30))
    assert_all_over(llm, abort=1)


def test_a_sync_loop_that_is_left_aborts_its_request(llm: LLM) -> None:
    for _ in llm.generate_async([1, 2, 3], LONG):
        break
    assert_all_over(llm, abort=1)


def test_abort_of_an_unknown_or_finished_request_is_ignored(llm: LLM) -> None:
    generation = llm.generate_async([1, 2, 3], SHORT)
    generation.result()
    generation.abort()
    llm.abort(generation.request_id)
    llm.abort(12345)
    assert_all_over(llm, length=1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, even if the tests were started with SIGINT ignored (in the background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_generate_aborts_its_requests_and_no_others(llm: LLM) -> None:
    main = threading.main_thread().ident
    assert main is not None
    launches = iter(range(10_000))

    def press(inputs: StepInputs) -> None:
        if len(inputs.spec.request_ids) == 4 and next(launches) == 9:  # by then generate() waits
            signal.pthread_kill(main, signal.SIGINT)

    before_each_launch(llm, press)
    other = llm.generate_async([3, 2, 1], MEDIUM)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 3, LONG)
    assert other.result().outputs[0].finish_reason == "length"
    assert_all_over(llm, length=1, abort=3)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([1, VOCAB], RequestError, "token id 16"),
        ("", RequestError, "prompt is empty"),
        ([1] * 200, CapacityError, "the cache holds 76"),
    ],
)
def test_a_bad_prompt_is_refused_at_once(target: Path, prompt: Any, error: type[Exception], words: str) -> None:
    with LLM(target, num_kv_blocks=20, block_size=4) as llm:
        with pytest.raises(error, match=words):
            llm.generate_async(prompt, SHORT)
        assert_all_over(llm)


def test_a_launch_that_fails_for_one_request_fails_it_alone(llm: LLM, short: RequestOutput) -> None:
    def poisoned(inputs: StepInputs) -> None:
        if (inputs.input_ids == POISON).any():
            raise RuntimeError("poisoned row")

    before_each_launch(llm, poisoned)
    params = dataclasses.replace(SHORT, min_tokens=12, stop_token_ids=[POISON])  # never sampled
    victim = llm.generate_async([1, POISON, 3], params)
    others = [llm.generate_async([1, 2, 3], params) for _ in range(3)]
    last = list(victim)[-1]
    assert (last.finish_reason, last.error, last.token_ids) == ("error", "RuntimeError: poisoned row", ())
    assert victim.result().outputs[0].error == last.error
    assert {other.result().outputs[0].finish_reason for other in others} == {"length"}
    assert_all_over(llm, error=1, length=3)


def breaks_after(llm: LLM, steps: int) -> threading.Event:
    """Let step() itself raise after `steps` steps, as a bug of the engine would.

    No step begins before the event is set.
    """
    engine, step, left, may_begin = llm.engine, llm.engine.step, iter(range(steps)), threading.Event()

    def broken() -> Any:
        may_begin.wait(60)
        if next(left, None) is None:
            raise ZeroDivisionError("a bug")
        return step()

    engine.step = broken  # type: ignore[method-assign]
    return may_begin


def test_a_step_that_raises_ends_everybody_with_an_error_that_names_it(llm: LLM) -> None:
    may_begin = breaks_after(llm, 5)
    read, unread = llm.generate_async([1, 2, 3], LONG), llm.generate_async([4], dataclasses.replace(LONG, n=2))
    may_begin.set()
    deltas: list[OutputDelta] = []
    with pytest.raises(EngineError, match="the engine failed and has stopped: ZeroDivisionError: a bug"):
        deltas.extend(read)
    assert len(deltas) == 5, "what came before is not lost"

    async def awaits() -> None:
        await unread

    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        asyncio.run(awaits())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_all_blocks_free(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([1, 2, 3], SHORT),
        lambda llm: llm.generate_async([1, 2, 3], SHORT),
        lambda llm: list(llm.stream([1, 2, 3], SHORT)),
    ],
    ids=["generate", "generate_async", "stream"],
)
def test_after_a_failure_calls_say_so(llm: LLM, call: Callable[[LLM], Any]) -> None:
    breaks_after(llm, 3).set()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        llm.generate([1, 2, 3], LONG)
    with pytest.raises(EngineError, match="the engine failed and has stopped: ZeroDivisionError: a bug"):
        call(llm)


def test_a_lost_block_is_a_failure(llm: LLM) -> None:
    llm.engine.loop.scheduler.allocator._free.pop()
    with pytest.raises(EngineError, match="KV cache accounting failed"):
        llm.generate([1, 2, 3], SHORT)


def test_shutdown_ends_what_runs(llm: LLM) -> None:
    async def reads(generation: Generation) -> str:
        try:
            async for _ in generation:
                pass
        except EngineError as error:
            return str(error)
        return "finished"

    async def all_read() -> list[str]:
        readers = [asyncio.create_task(reads(generation)) for generation in generations]
        await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        return await asyncio.gather(*readers)

    engine = llm.engine
    generations = [llm.generate_async([1, 2, 3], LONG) for _ in range(12)]  # some run, some wait
    assert asyncio.run(all_read()) == ["this LLM was shut down; make a new one"] * 12
    assert not engine.has_work
    assert engine.loop.scheduler.allocator.num_free == LIMITS["num_kv_blocks"] - 1


@pytest.mark.parametrize(
    "call",
    [lambda llm: llm.generate_async([1]), lambda llm: next(llm.stream([1])), lambda llm: llm.abort(0)],
    ids=["generate_async", "stream", "abort"],
)
def test_after_shutdown_calls_say_so(llm: LLM, call: Callable[[LLM], Any]) -> None:
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down; make a new one"):
        call(llm)


# -- the end of an LLM and of the interpreter ----------------------------------------------------------------------


def test_an_llm_that_nobody_holds_finishes_what_it_began_and_is_freed(target: Path, short: RequestOutput) -> None:
    llm = LLM(target)
    engine = weakref.ref(llm.engine)
    generation = llm.generate_async([1, 2, 3], SHORT)
    del llm
    assert offline(generation.result()) == offline(short)
    deadline = time.monotonic() + 10
    while engine() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert engine() is None


def test_an_interpreter_that_ends_does_not_wait_for_what_runs(target: Path) -> None:
    program = f"""if True:
        from trtspec import LLM, SamplingParams
        llm = LLM({str(target)!r})
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        generations = [llm.generate_async([1, 2, 3], params) for i in range(300)]
        for delta in generations[0]:
            print(delta.request_id)
            break
        """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
