"""Time of a step by phase: verifying, accepting, drafting, and the host's work before, between and after."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec.bench.decode import greedy, versions
from trtspec.bench.phases import phases_of_loop
from trtspec.engine.core import EngineCore
from trtspec.llm import LLM
from trtspec.outputs import or_none
from trtspec.sampling_params import SamplingParams

PHASES = ("inputs", "verify", "accept", "draft", "deliver", "host")
"""Phases of a step.

- inputs: scheduling, packing rows, checking them.
- verify: the target's forward pass and lm_head.
- accept: sampling and comparing.
- draft: draft passes, including their sampling.
- deliver: handing tokens, text and drafts to their requests.
- host: everything else.

A compiled one-engine step is a single launch: its whole graph counts as `verify`.
"""


class Clock:
    """A sum of the seconds spent in each phase. A phase entered inside another is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    def turn(self, name: str | None) -> None:
        """Count the time from here on for phase `name`; None: for the phase around the one that ends here."""
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
    """Time the phases of the engine's steps with `clock`, inside the context.

    The methods that make up the steps are wrapped meanwhile.
    """
    undo: list[Callable[[], None]] = []
    try:
        for method in phases_of_loop(engine.loop):
            undo.append(_wrap(*method, clock))
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _wrap(owner: object, name: str, phase: str, clock: Clock) -> Callable[[], None]:
    """Time `owner.name` as `phase`; return a function that removes the wrapper."""
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
    """Time greedy decoding of the prompts (token ids) phase by phase, as one batch, after a warm-up run.

    Returns a JSON-ready dict of the settings and these results:
    - us_per_step: microseconds of each of PHASES, and of `total`, their sum. They are means over the steps in which all
      requests generate, of which only the middle half by total counts.
    - steps; batch; versions.
    - acceptance_length: mean tokens per step that had drafts; None if no step had drafts.
    - tokens_per_step: mean over all generation steps.

    The wrappers themselves cost a few microseconds.
    """
    params = greedy(output_len)
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
    """Return the seconds by phase of each step without context rows."""
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
