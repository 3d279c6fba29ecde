"""Where a step's time goes: verifying, accepting, drafting, and what the host does before, between and after."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec.bench.decode import versions
from trtspec.bench.phases import phases_of_loop
from trtspec.engine.core import EngineCore
from trtspec.llm import LLM
from trtspec.outputs import or_none
from trtspec.sampling_params import SamplingParams

PHASES = ("inputs", "verify", "accept", "draft", "deliver", "host")
"""Scheduling, packing rows, checking them; the target's forward pass and lm_head; drawing and comparing; draft passes,
their draws included; handing tokens, text and drafts to their requests; everything else.

A compiled one-engine step is a single launch: all of the graph counts as `verify`."""


class Clock:
    """Adds up the seconds spent in each phase. A phase entered inside another is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    def turn(self, name: str | None) -> None:
        """Time from here on belongs to `name`; None: to the phase around the one that ends here."""
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        if name is None:
            self._inside.pop()
        else:
            self._inside.append(name)
        self._since = now


@contextmanager
def measured(engine: EngineCore, clock: Clock) -> Iterator[None]:
    """Inside, `clock` knows the phases of the engine's steps: the methods that make them up are wrapped."""
    undo: list[Callable[[], None]] = []
    try:
        for method in phases_of_loop(engine.loop):
            undo.append(_wrap(*method, clock))
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _wrap(owner: object, name: str, phase: str, clock: Clock) -> Callable[[], None]:
    """Time `owner.name` as `phase`; returns what takes the wrapper off again."""
    inner, own = getattr(owner, name), name in vars(owner)

    def timed(*arguments: Any, **options: Any) -> Any:
        clock.turn(phase)
        try:
            return inner(*arguments, **options)
        finally:
            clock.turn(None)

    setattr(owner, name, timed)
    return (lambda: setattr(owner, name, inner)) if own else (lambda: delattr(owner, name))


def profile_decode(
    model: str | Path,
    speculative_config: Any,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    **engine_options: Any,
) -> dict[str, Any]:
    """Greedy decoding of the prompts (token ids) as one batch, after a run that warms up, timed phase by phase.

    Returns a JSON-ready dict: `us_per_step` (of each of PHASES and `total`, their sum: means over the middle half, by
    total, of the steps in which all requests generate), steps, acceptance_length (mean tokens per step that had drafts;
    None if none had), tokens_per_step (of all generation steps), batch, versions. The wrappers themselves cost a few
    microseconds.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    llm = LLM(model, speculative_config, **{"max_batch_size": max(len(prompts), 1), **engine_options})
    _steps(llm.engine, prompts, params)
    steps = _steps(llm.engine, prompts, params)
    steps.sort(key=lambda step: step["total"])
    middle = steps[len(steps) // 4 : len(steps) - len(steps) // 4]
    speculation = llm.engine.stats.speculation
    phases = {name: 1e6 * statistics.fmean(step[name] for step in middle) for name in (*PHASES, "total")}
    return {
        "model": str(model),
        "speculation": None if speculative_config is None else str(speculative_config),
        "batch": len(prompts),
        "output_len": output_len,
        "steps": len(steps),
        "us_per_step": phases,
        "acceptance_length": or_none(speculation.acceptance_length),
        "tokens_per_step": or_none(speculation.tokens_per_step),
        "versions": versions(),
    }


def _steps(engine: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Mapping[str, float]]:
    """Seconds by phase of each step without context rows."""
    for prompt in prompts:
        engine.add_request(prompt, params)
    steps: list[Mapping[str, float]] = []
    while engine.has_work:
        clock = Clock()
        with measured(engine, clock):
            start = time.perf_counter()
            emissions = engine.step()
            total = time.perf_counter() - start
        if emissions and not any(emission.is_context for emission in emissions):
            inside = {name: clock.seconds[name] for name in PHASES}
            steps.append({**inside, "host": total - sum(inside.values()), "total": total})
    return steps
