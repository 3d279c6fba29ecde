"""Faults of one request, or of the device. test_gpu_faults.py calls them on a GPU, test_selfcheck.py without one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from tests.e2e.test_faults import BYSTANDERS, LIMITS, POISON, poison_embedding
from tests.e2e.tiny import VOCAB, Case, assert_all_blocks_free, run_alone, run_together
from tests.gpu.engines import on_gpu
from trtspec import SamplingParams
from trtspec.backends.cuda.device import WorkQueue
from trtspec.errors import EngineError

BANNED = Case(
    [3, 2, 1], SamplingParams(temperature=0.0, max_tokens=12, min_tokens=3, stop_token_ids=list(range(VOCAB)))
)
"""A request in which every token is banned before the third."""


def check_it_fails_alone(target: Path, victim: Case, poisoned: bool) -> None:
    """Check that a request without a token to draw ends with an error that says so, and that the others are unaffected.

    The others use its blocks after it. poisoned: whether rows of POISON, which is in its prompt, are NaN.
    """
    with on_gpu(target, **LIMITS) as llm:
        expected = run_alone(llm.engine, BYSTANDERS)
    with on_gpu(target, **LIMITS, debug=True) as llm:
        if poisoned:
            poison_embedding(llm, POISON)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the poison was written on another stream than the engine's
        (request,) = llm.engine.add_request(victim.prompt, victim.params)
        run = run_together(llm.engine, BYSTANDERS)
        assert_all_blocks_free(llm)
    assert run.outcomes == expected
    assert request.finish_reason == "error"
    assert "no token can be drawn" in str(request.error)


def lose_device(target: Path, provoke: Callable[[], None]) -> str:
    """Return, as JSON, what callers get when `provoke` is the 7th piece of work that an engine queues.

    The engine has three requests. The list has the error's type and message for each, and for a request made later.
    """
    llm = on_gpu(target, **LIMITS)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    work: WorkQueue = llm.engine.loop.target.inner._work  # type: ignore[attr-defined]
    submit, count = work.submit, 0

    def sabotaged(piece: Callable[[], None]) -> None:
        nonlocal count
        count += 1
        submit(provoke if count == 7 else piece)

    work.submit = sabotaged  # type: ignore[method-assign]
    running = [llm.generate_async([1, 2, 3], dataclasses.replace(params, seed=seed)) for seed in range(3)]
    heard = []
    for generation in running:
        try:
            heard.append(str(generation.result(timeout=60).outputs[0].token_ids))
        except EngineError as error:
            heard.append(f"{type(error).__name__}: {error}")
    try:
        llm.generate_async([1], params)
    except EngineError as error:
        heard.append(f"{type(error).__name__}: {error}")
    return json.dumps(heard)


def assert_lost(heard: list[str]) -> None:
    """Check that all four callers got the error that the GPU failed, and what to do."""
    assert len(heard) == 4
    for message in heard:
        assert message.startswith("EngineError: the engine failed and has stopped: DeviceError: the GPU failed: CUDA")
        assert "start this process anew" in message


def provoke_assert() -> None:
    """Index past the end of a tensor on the GPU, so that a kernel of torch's asserts."""
    values = torch.zeros(3, device="cuda")
    values[torch.tensor([7], device="cuda")].add_(1)
