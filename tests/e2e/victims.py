"""A victim and bystanders that run together: a fault of the victim must not change the bystanders' outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.tiny import Case, Outcome, Run, draw_cases, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.engine.request import Request

K = 3
POISON = 15  # in no bystander's prompt or output
LIMITS: dict[str, Any] = {"max_batch_size": 6, "max_num_tokens": 40, "num_kv_blocks": 60, "block_size": 4}


def _without_poison(case: Case) -> Case:
    """Return the case with a prompt free of POISON, and with outputs free of it.

    POISON is a stop id, which cannot be sampled before min_tokens, and min_tokens equals max_tokens.
    """
    prompt = [1 if token == POISON else token for token in case.prompt]
    return Case(
        prompt,
        dataclasses.replace(case.params, stop_token_ids=[POISON], min_tokens=case.params.max_tokens, stop=()),
    )


BYSTANDERS = [_without_poison(case) for case in draw_cases(6, seed=21, most_tokens=16)]
VICTIM = Case(
    [3, 4, 5, 6, 7, POISON, 8, 9, 10], SamplingParams(temperature=1.0, seed=14, max_tokens=20, ignore_eos=True)
)


def alone(target: Path, cases: list[Case]) -> list[Outcome]:
    """The outcome of each case by plain decoding."""
    with LLM(target) as llm:
        return run_alone(llm.engine, cases)


def right_answers(outcomes: list[Outcome]) -> list[list[int]]:
    """Prompt and output of the victim, which is request 0, and of the bystanders, 1 and on, for a LyingOracle."""
    return [case.prompt + outcome.token_ids for case, outcome in zip((VICTIM, *BYSTANDERS), outcomes, strict=True)]


def user_llm(target: Path, drafter: object) -> LLM:
    return LLM(target, {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": K}, **LIMITS)


def run_with_bystanders(
    llm: LLM, victim: Case = VICTIM, steps: int = 0, sabotage: Callable[[list[Request]], None] | None = None
) -> tuple[list[Request], Run]:
    """Run the victim for `steps` steps, call `sabotage` on its samples, then run the bystanders until all is done."""
    samples = llm.engine.add_request(victim.prompt, victim.params)
    for _ in range(steps):
        llm.engine.step()
    if sabotage is not None:
        sabotage(samples)
    return samples, run_together(llm.engine, BYSTANDERS)
