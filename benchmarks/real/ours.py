"""This engine's own contestants: engine folders, and the speed of one with a queue of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.steps.engines import Workshop
from benchmarks.steps.sections import Guesses
from examples.smollm2.__main__ import HEAD, model_folder
from trtspec import LLM, SamplingParams
from trtspec.outputs import SpeculationStats

METHODS = ("plain", "ngram", "suffix", "eagle3", "combined", "rows", "two-engine")
"""combined: EAGLE3 with lookups where the text repeats itself. rows: K wrong drafts, which cost nothing to make.

two-engine: EAGLE3 with the head in an engine of its own.
"""

WITH_HEAD = ("eagle3", "combined", "two-engine")
NAMES = {"plain": "plain", "ngram": "n-gram", "suffix": "suffix", "eagle3": "EAGLE3", "combined": "EAGLE3 + lookups"}


@dataclass(frozen=True)
class Own:
    """One of METHODS, and the format of its head, if it has one."""

    method: str
    head: str = "bf16"


LIMITS = {"max_batch_size": 8, "max_seq_len": 1024}


Schedule = dict[int, int]
"""Number of drafts a step by largest batch size."""


def speculation_of(
    method: str,
    K: int | Literal["auto"],
    head_format: str = "bf16",
    schedule: Schedule | None = None,
    threshold: float | None = None,
) -> dict[str, Any] | None:
    """The speculative_config of one of METHODS.

    Of EAGLE3 alone: schedule, whose first K is `K`, and threshold, the draft_confidence_threshold; None = none.
    """
    if method == "plain":
        return None
    if method == "rows":
        guesses = Guesses(2**14)  # ids that any vocabulary has; none is right except by chance
        guesses.use(K)
        return {"method": "custom_class", "drafter": guesses, "num_speculative_tokens": K}
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    elif method == "suffix":  # prompts repeat here, and earlier answers would be the same
        config |= {"suffix_decoding_max_cached_requests": 0}
    elif method in WITH_HEAD:
        config |= {"method": "eagle3", "model": str(HEAD), "one_engine": method != "two-engine"}
        config |= {"sa_config": {}} if method == "combined" else {}
        config |= {} if head_format == "bf16" else {"quantization": head_format}
        config |= {} if schedule is None else {"draft_len_schedule": schedule}
        config |= {} if threshold is None else {"draft_confidence_threshold": threshold}
    return config


def engine_of(
    shop: Workshop,
    method: str,
    K: int | Literal["auto"],
    format: str,
    head_format: str = "bf16",
    schedule: Schedule | None = None,
    threshold: float | None = None,
) -> tuple[Path, dict[str, Any] | None]:
    """A compiled folder, built unless it is there, and the speculative_config to load it with.

    Lookups run on the engine of plain decoding, or of the head that they are combined with.
    """
    quantised: dict[str, Any] = {} if format == "bf16" else {"quantization": format}
    looks_up = method == "combined"  # the engine of EAGLE3 takes lookups when it starts
    method = "eagle3" if looks_up else method
    own = speculation_of(method, K, head_format, schedule, threshold)
    at_load = {"sa_config": {}} if looks_up else None if method in WITH_HEAD else own
    in_graph = own if method in WITH_HEAD else None
    name = f"smollm2-{format}" if in_graph is None else f"smollm2-{format}-{method}-{head_format}-{K}"
    name += "" if schedule is None else "-by-batch"
    name += "" if threshold is None else f"-over-{threshold:g}"
    return shop.engine(name, model_folder(), in_graph, **LIMITS, **quantised), at_load


def open_engine(shop: Workshop, method: str, K: int, format: str, head_format: str = "bf16") -> LLM:
    """Load an LLM from the folder of `engine_of`."""
    folder, lookup = engine_of(shop, method, K, format, head_format)
    return LLM(folder, lookup, generation_config="off", enable_prefix_caching=False)


@dataclass
class Run:
    """The result of a queue of prompts: its steps without context rows and with a full batch. Times are in seconds.

    launches: time of each executable in those steps. texts: ids of all answers.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    launches: list[float] = field(default_factory=list)
    bytes_read: int = 0
    texts: list[list[int]] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps


def run_queue(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], batch: int) -> Run:
    """Answer all prompts, `batch` at a time; the next prompt starts when a request is done."""
    engine, run = llm.engine, Run()
    waiting = list(zip(prompts, params, strict=True))[::-1]
    samples = []
    run.launches = [0.0] * len(engine.executables)
    running = 0
    while waiting or engine.has_work:
        while waiting and running < batch:
            samples.append(engine.add_request(*waiting.pop())[0])
            running += 1
        before = [executable.seconds for executable in engine.executables]
        read = sum(executable.bytes_read for executable in engine.executables)
        start = time.perf_counter()
        emissions = engine.step()
        elapsed = time.perf_counter() - start
        if len(emissions) == batch and not any(emission.is_context for emission in emissions):
            run.steps += 1
            run.seconds += elapsed
            run.tokens += sum(len(emission.tokens) for emission in emissions)
            run.launches = [
                total + executable.seconds - earlier
                for total, executable, earlier in zip(run.launches, engine.executables, before, strict=True)
            ]
            run.bytes_read += sum(executable.bytes_read for executable in engine.executables) - read
        running -= sum(emission.request.finished for emission in emissions)
    for sample in samples:
        if sample.error is not None:
            raise sample.error
    run.texts = [sample.output_ids for sample in samples]
    run.speculation = SpeculationStats.total(sample.stats for sample in samples)
    return run


def sampling(temperature: float, count: int, max_tokens: int) -> list[SamplingParams]:
    """Sampling parameters of `count` prompts; each prompt has a seed of its own."""
    return [
        SamplingParams(
            temperature=temperature, seed=i if temperature else None, max_tokens=max_tokens, detokenize=False
        )
        for i in range(count)
    ]
