"""Many callers at once: event loops, threads, slow readers, and requests that do not wait for each other.

Each output is compared with the output of plain offline decoding for the same prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import async_cases
from tests.e2e.async_cases import (
    LIMITS,
    LONG,
    MEDIUM,
    NGRAM,
    SHORT,
    HeldLaunch,
    Sample,
    assert_all_over,
    assert_part_of,
    before_each_launch,
    joined,
    offline,
    read,
)
from tests.e2e.tiny import VOCAB, Case, assert_all_blocks_free, draw_cases
from trtspec import LLM, OutputDelta, RequestOutput
from trtspec.errors import RequestError

llm = async_cases.llm
short = async_cases.short


# -- many at once --------------------------------------------------------------------------------------------------

NUM_READERS = 64
WAYS = ("read", "read slowly", "read late", "await", "leave", "abort", "abort by id", "cancel")


def some_cases(seed: int) -> list[Case]:
    """Return NUM_READERS cases. Two of three have two or three samples; about half stop at a string or an id."""
    cases = draw_cases(NUM_READERS, seed=seed, most_prompt=60)
    return [
        Case(case.prompt, dataclasses.replace(case.params, n=1 + i % 3)) if i % 3 else case
        for i, case in enumerate(cases)
    ]


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


# -- callers that do not wait for each other -----------------------------------------------------------------------


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
                assert free.wait(30)  # the whole event loop waits, too
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
    """Other requests get tokens in each of the 10 steps that the prefill of 400 tokens takes."""
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
