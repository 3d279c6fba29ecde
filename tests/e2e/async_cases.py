"""Shared parts of the tests of concurrent callers: limits, the outputs that a reader sees, and targets with hooks."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import EOS, PIECES, Case, assert_all_blocks_free
from trtspec import LLM, OutputDelta, RequestOutput, SamplingParams
from trtspec.core import StepInputs, StepOutputs
from trtspec.protocols import Executable

LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 48, "num_kv_blocks": 150, "block_size": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SHORT = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
MEDIUM = SamplingParams(temperature=1.0, seed=6, max_tokens=100, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=6, max_tokens=400, ignore_eos=True)  # for requests that are aborted
POISON = 15


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, NGRAM, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def short(target: Path) -> RequestOutput:
    """The output of SHORT for the prompt [1, 2, 3], run alone."""
    with LLM(target) as llm:
        return llm.generate([1, 2, 3], SHORT)[0]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample as its reader saw it, or as `generate` returns it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def joined(deltas: Iterable[OutputDelta], n: int = 1) -> list[Sample]:
    """The samples that the deltas add up to."""
    samples = [Sample((), "", None, None)] * n
    for delta in deltas:
        so_far = samples[delta.index]
        assert so_far.finish_reason is None, "a delta after the last one"
        samples[delta.index] = Sample(
            so_far.token_ids + delta.token_ids, so_far.text + delta.text, delta.finish_reason, delta.stop_reason
        )
    return samples


def offline(output: RequestOutput) -> list[Sample]:
    """The samples of a finished output, as `generate` returns it."""
    return [Sample(tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def assert_part_of(part: Sample, whole: Sample) -> None:
    """Check that `part` is a beginning of `whole`.

    Its ids are the first ids of `whole`. Its text is a beginning of the text of its ids.
    """
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert "".join(PIECES[token] for token in part.token_ids if token != EOS).startswith(part.text)


def assert_all_over(llm: LLM, **finished: int) -> None:
    """Check that nothing is left in the engine. finished: number of samples by finish reason."""
    engine = llm.engine  # the property waits until no step runs
    assert not engine.has_work
    assert_all_blocks_free(llm)
    assert llm.get_metrics().finished == finished


class Hooked:
    """The target, with a hook that is called before every launch."""

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
    """A hook that holds the first launch: it begins, and goes on only when `let_go` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self.begun.set()
        assert self.let_go.wait(30)


async def read(llm: LLM, case: Case, way: str, rng: random.Random, others: asyncio.Event) -> list[Sample]:
    """Return the samples that one reader sees.

    way: how it reads. With "leave" and the three ways to abort, it stops after a few deltas.
    """
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
