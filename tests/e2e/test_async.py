"""Many callers at once: event loops, threads, slow readers, readers that leave, and an engine that breaks.

What each gets is compared with what plain decoding gives for its prompt offline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import EOS, PIECES, VOCAB, Case, assert_all_blocks_free, draw_cases
from trtspec import LLM, Generation, OutputDelta, RequestOutput, SamplingParams
from trtspec.core import StepInputs, StepOutputs
from trtspec.errors import CapacityError, EngineError, RequestError
from trtspec.protocols import Executable

LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 48, "num_kv_blocks": 150, "block_size": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SHORT = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
MEDIUM = SamplingParams(temperature=1.0, seed=6, max_tokens=100, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=6, max_tokens=400, ignore_eos=True)  # to be aborted
POISON = 15


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, NGRAM, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def short(target: Path) -> RequestOutput:
    """What SHORT gives for [1, 2, 3], alone."""
    with LLM(target) as llm:
        return llm.generate([1, 2, 3], SHORT)[0]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample as its reader saw it, or as `generate` gives it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def joined(deltas: Iterable[OutputDelta], n: int = 1) -> list[Sample]:
    """The samples that the deltas make."""
    samples = [Sample((), "", None, None)] * n
    for delta in deltas:
        so_far = samples[delta.index]
        assert so_far.finish_reason is None, "a delta after the last one"
        samples[delta.index] = Sample(
            so_far.token_ids + delta.token_ids, so_far.text + delta.text, delta.finish_reason, delta.stop_reason
        )
    return samples


def offline(output: RequestOutput) -> list[Sample]:
    """The samples of an output."""
    return [Sample(tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def assert_part_of(part: Sample, whole: Sample) -> None:
    """Its ids begin the whole's; its text is that of its ids, as far as it goes."""
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert "".join(PIECES[token] for token in part.token_ids if token != EOS).startswith(part.text)


def assert_all_over(llm: LLM, **finished: int) -> None:
    """Nothing is left in the engine, and the samples ended for these reasons."""
    engine = llm.engine  # waits until nothing runs
    assert not engine.has_work
    assert_all_blocks_free(llm)
    assert llm.get_metrics().finished == finished


class Hooked:
    """The target, with something done before every launch."""

    def __init__(self, inner: Executable, hook: Callable[[StepInputs], object]) -> None:
        self.inner = inner
        self.hook = hook

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.hook(inputs)
        return self.inner.run(inputs)


def before_each_launch(llm: LLM, hook: Callable[[StepInputs], object]) -> None:
    loop = llm.engine.loop
    llm.engine.loop = dataclasses.replace(loop, target=Hooked(loop.target, hook))


class HeldLaunch:
    """A hook: the first launch begins and does not go on until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self.begun.set()
        assert self.let_go.wait(30)


# -- many at once --------------------------------------------------------------------------------------------------

NUM_READERS = 64
WAYS = ("read", "read slowly", "read late", "await", "leave", "abort", "abort by id", "cancel")


def some_cases(seed: int) -> list[Case]:
    """Every third case with two samples or three; half of all stop at a string or an id."""
    cases = draw_cases(NUM_READERS, seed=seed, most_prompt=60)
    return [
        Case(case.prompt, dataclasses.replace(case.params, n=1 + i % 3)) if i % 3 else case
        for i, case in enumerate(cases)
    ]


async def read(llm: LLM, case: Case, way: str, rng: random.Random, others: asyncio.Event) -> list[Sample]:
    """What one reader sees. It leaves or aborts after a few deltas, if that is its way."""
    await asyncio.sleep(rng.random() / 20)
    generation = llm.generate_async(case.prompt, case.params)
    if way == "await":
        return offline(await generation)
    if way == "read late":
        await others.wait()
    deltas: list[OutputDelta] = []
    patience = rng.randint(0, 4)

    async def collect() -> None:
        async for delta in generation:
            deltas.append(delta)
            if way == "read slowly":
                await asyncio.sleep(rng.random() / 100)
            if len(deltas) > patience:
                if way == "leave":
                    break
                if way == "abort":
                    generation.abort()
                if way == "abort by id":
                    llm.abort(generation.request_id)

    if way == "cancel":
        task = asyncio.create_task(collect())
        await asyncio.sleep(rng.random() / 10)
        task.cancel()
        await asyncio.wait([task])
    else:
        await collect()
    return joined(deltas, case.params.n)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_reader_gets_what_generate_gives(target: Path, draft: Path, method: str) -> None:
    cases = some_cases(seed=len(method))
    with LLM(target) as plain:
        wholes = [offline(output) for output in plain.generate([c.prompt for c in cases], [c.params for c in cases])]
    speculation = (
        {**NGRAM} if method == "ngram" else {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    )
    llm = LLM(target, speculation, **{**LIMITS, "num_kv_blocks": 60})
    ways = [WAYS[i % len(WAYS)] for i in range(NUM_READERS)]

    async def everybody() -> list[list[Sample]]:
        others = asyncio.Event()
        readers = [
            asyncio.create_task(read(llm, case, way, random.Random(i), others))
            for i, (case, way) in enumerate(zip(cases, ways, strict=True))
        ]
        await asyncio.wait([task for task, way in zip(readers, ways, strict=True) if way != "read late"])
        others.set()
        return [await task for task in readers]

    for way, seen, whole in zip(ways, asyncio.run(everybody()), wholes, strict=True):
        if way in ("read", "read slowly", "read late", "await"):
            assert seen == whole, way
        else:
            for part, sample in zip(seen, whole, strict=True):
                assert_part_of(part, sample)
    assert not llm.engine.has_work
    assert_all_blocks_free(llm)
    finished, acceptance = llm.get_metrics().finished, llm.get_metrics().speculation.acceptance_per_position
    assert sum(finished.values()) == sum(case.params.n for case in cases)
    assert finished["abort"] > 5
    assert all(0 < share < 1 for share in acceptance)


def test_samples_come_side_by_side_and_tell_their_index(llm: LLM) -> None:
    params = dataclasses.replace(SHORT, n=3)
    deltas = list(llm.generate_async([1, 2, 3], params))
    assert joined(deltas, 3) == offline(llm.generate([1, 2, 3], params)[0])
    last = [max(i for i, delta in enumerate(deltas) if delta.index == sample) for sample in range(3)]
    assert min(last) > 3, "one sample after the other"


def test_accepted_drafts_are_counted_in_the_deltas(llm: LLM) -> None:
    generation = llm.generate_async([1, 2, 3, 4] * 4, MEDIUM)
    accepted = sum(delta.num_accepted_drafts for delta in generation)
    assert accepted == generation.result().speculation.num_accepted_tokens > 0


def test_seeds_that_were_not_given_follow_the_order_of_submission(target: Path) -> None:
    params = dataclasses.replace(SHORT, seed=None)
    with LLM(target) as together, LLM(target) as one_by_one:
        expected = together.generate([[1, 2, 3]] * 4, params)
        generations = [one_by_one.generate_async([1, 2, 3], params) for _ in range(4)]
        assert [g.result().outputs[0].seed for g in generations] == [e.outputs[0].seed for e in expected]


def test_all_ways_to_read_one_generation_agree(llm: LLM, short: RequestOutput) -> None:
    async def twice() -> tuple[list[OutputDelta], RequestOutput, RequestOutput]:
        return [delta async for delta in generation], await generation, await generation.aresult()

    generation = llm.generate_async([1, 2, 3], SHORT)
    output = generation.result()
    deltas, *again = asyncio.run(twice())
    assert offline(output) == offline(again[0]) == offline(again[1]) == offline(short) == joined(deltas)
    assert list(generation) == deltas


# -- nobody waits for anybody --------------------------------------------------------------------------------------


def test_who_never_reads_does_not_stall_others(llm: LLM, short: RequestOutput) -> None:
    unread = llm.generate_async([3, 2, 1], MEDIUM)
    outputs = [llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0] for _ in range(3)]
    assert [offline(output) for output in outputs] == [offline(short)] * 3
    unread.result()
    assert len(joined(unread)[0].token_ids) == 100


def test_a_loop_that_is_stuck_does_not_stall_others(llm: LLM, short: RequestOutput) -> None:
    stuck, free = threading.Event(), threading.Event()

    async def get_stuck() -> list[Sample]:
        deltas = []
        async for delta in llm.generate_async([3, 2, 1], MEDIUM):
            deltas.append(delta)
            if not stuck.is_set():
                stuck.set()
                assert free.wait(30)  # and the whole loop with it
        return joined(deltas)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(asyncio.run, get_stuck())
        assert stuck.wait(30)
        assert offline(llm.generate([1, 2, 3], SHORT)[0]) == offline(short)
        free.set()
        assert len(reader.result()[0].token_ids) == 100


def test_callers_do_not_wait_for_the_step_in_flight(llm: LLM) -> None:
    held = HeldLaunch()
    before_each_launch(llm, held)
    first = llm.generate_async([1, 2, 3], LONG)
    assert held.begun.wait(30)
    second = llm.generate_async([1, 2, 3], SHORT)
    with pytest.raises(RequestError):
        llm.generate_async([VOCAB])
    first.abort()
    with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
        second.result(timeout=0.01)
    held.let_go.set()
    assert second.result().outputs[0].finish_reason == "length"
    assert_all_over(llm, length=1, abort=1)


def test_a_long_prompt_does_not_stall_who_generates(llm: LLM) -> None:
    """400 tokens take 10 steps to be read in, and the others go on in each of them."""
    generation = iter(llm.generate_async([1, 2, 3], LONG))
    next(generation)
    late = llm.generate_async([4] * 400, SHORT)
    num_deltas = 0
    for _ in generation:
        num_deltas += 1
        if late._deltas:
            break
    assert num_deltas >= 8


def test_idle_there_is_no_thread_and_no_step(llm: LLM) -> None:
    llm.generate([1, 2, 3], SHORT)
    steps, cpu = llm.engine.stats.steps, time.process_time()
    time.sleep(0.3)
    assert time.process_time() - cpu < 0.1
    assert llm.get_metrics().steps == steps
    assert not [thread for thread in threading.enumerate() if thread.name == "trtspec-engine"]


# -- leaving early -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_abort_from_another_thread(llm: LLM, n: int) -> None:
    generation = llm.generate_async([1, 2, 3], dataclasses.replace(LONG, n=n))
    threading.Timer(0.05, generation.abort).start()
    assert {sample.finish_reason for sample in generation.result().outputs} == {"abort"}
    assert joined(generation, n) == offline(generation.result())
    assert_all_over(llm, abort=n)


def test_abort_by_id_after_the_first_sample_has_ended(llm: LLM) -> None:
    """The request's id is that of its first sample."""
    text = llm.generate([1, 2, 3], MEDIUM)[0].outputs[0].text
    params = dataclasses.replace(LONG, n=2, stop=text[:10])  # the other sample has another text
    generation = llm.generate_async([1, 2, 3], params)
    for delta in generation:
        if delta.index == 0 and delta.finished:
            llm.abort(generation.request_id)
    assert [sample.finish_reason for sample in generation.result().outputs] == ["stop", "abort"]


def test_abort_hands_out_what_was_held_back(llm: LLM) -> None:
    """Everything is held back, because it may be the beginning of the stop string."""
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
        while llm.get_metrics().finished != {"abort": 1}:  # the loop goes on: not only its end aborts
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
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started with SIGINT ignored (in the background)."""
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


# -- threads -------------------------------------------------------------------------------------------------------


def test_threads_that_generate_and_stream_at_once_get_what_they_get_alone(target: Path) -> None:
    cases = draw_cases(24, seed=9)
    prompts, params = [case.prompt for case in cases], [case.params for case in cases]
    with LLM(target) as plain:
        expected = [offline(output) for output in plain.generate(prompts, params)]

    with LLM(target, NGRAM, **LIMITS) as llm, ThreadPoolExecutor(6) as pool:
        batches = [pool.submit(llm.generate, prompts[i : i + 4], params[i : i + 4], False) for i in range(0, 12, 4)]
        streams = [pool.submit(list, llm.stream(prompts[i], params[i])) for i in range(12, 24)]  # type: ignore[arg-type]
        seen = [offline(output) for batch in batches for output in batch.result()]
        seen += [joined(deltas.result()) for deltas in streams]
    assert seen == expected


def test_generate_refuses_all_prompts_if_one_is_bad_while_others_run(llm: LLM) -> None:
    other = llm.generate_async([1, 2, 3], LONG)
    with pytest.raises(RequestError, match="token id 16"):
        llm.generate([[1], [2], [VOCAB]], SHORT)
    other.abort()
    assert_all_over(llm, abort=1)


# -- what goes wrong -----------------------------------------------------------------------------------------------


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
    params = dataclasses.replace(SHORT, min_tokens=12, stop_token_ids=[POISON])  # never drawn
    victim = llm.generate_async([1, POISON, 3], params)
    others = [llm.generate_async([1, 2, 3], params) for _ in range(3)]
    last = list(victim)[-1]
    assert (last.finish_reason, last.error, last.token_ids) == ("error", "RuntimeError: poisoned row", ())
    assert victim.result().outputs[0].error == last.error
    assert {other.result().outputs[0].finish_reason for other in others} == {"length"}
    assert_all_over(llm, error=1, length=3)


def breaks_after(llm: LLM, steps: int) -> threading.Event:
    """step() itself raises, which is a bug of the engine. No step begins before the event is set."""
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


# -- the end -------------------------------------------------------------------------------------------------------


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
