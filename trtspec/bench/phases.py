"""Methods by phase of a step, for the objects of an engine that a profile looks into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import trtspec.engine.step as loop_module
from trtspec.backends.compiled import CompiledExecutable
from trtspec.backends.cuda.executable import CudaExecutable, DeviceLaunch
from trtspec.backends.eager import EagerExecutable
from trtspec.engine.batch import InputBuilder
from trtspec.engine.stats import TimedExecutable
from trtspec.engine.steady import SteadyBatch, SteadyLoop
from trtspec.engine.step import StepLoop
from trtspec.methods.step import OneEngineStep
from trtspec.methods.worker import SpecWorker

PhaseMethod = tuple[object, str, str]
"""(owner, name of a method, phase): calls of the method belong to that phase of a step."""


def phases_of_loop(loop: StepLoop) -> list[PhaseMethod]:
    """Return all methods in the loop's steps that are timed.

    Methods of the input builder are looked up in its class.
    """
    methods: list[PhaseMethod] = [
        (loop.scheduler, "schedule", "inputs"),
        (InputBuilder, "build", "inputs"),
        (InputBuilder, "repeat_batch", "inputs"),
        (SteadyBatch, "can_repeat", "inputs"),
        (loop.target, "run", "verify"),
        *phases_inside(loop.target),
        (loop_module, "accept", "accept"),
        (SteadyBatch, "record", "deliver"),
        (StepLoop, "update", "deliver"),
        (SteadyLoop, "settle", "deliver"),
        (loop.proposer, "propose", "deliver"),
    ]
    if loop.proposer.drafter is not None:
        methods.append((loop.proposer.drafter, "propose", "draft"))
    return methods


@singledispatch
def phases_inside(part: object) -> Sequence[PhaseMethod]:
    """Return the methods inside a launch of the target that are not verification.

    The result is empty if they cannot be told apart.
    """
    return ()


@phases_inside.register
def _(part: TimedExecutable) -> Sequence[PhaseMethod]:
    return phases_inside(part.inner)


@phases_inside.register
def _(part: EagerExecutable) -> Sequence[PhaseMethod]:
    return phases_inside(part.step)


@phases_inside.register
def _(part: OneEngineStep) -> Sequence[PhaseMethod]:
    return phases_inside(part.worker)


@phases_inside.register
def _(part: SpecWorker) -> Sequence[PhaseMethod]:
    return (
        (part, "sample_tokens_for_batch", "accept"),
        (part, "sample_and_accept_draft_tokens", "accept"),
        (part, "read_in", "draft"),
        (part, "draft", "draft"),
    )


@phases_inside.register
def _(part: CompiledExecutable) -> Sequence[PhaseMethod]:
    """Return the host's methods around a launch: the graph itself is one unit."""
    return (part, "_checked", "inputs"), (part, "_outputs", "deliver")


@phases_inside.register
def _(part: CudaExecutable) -> Sequence[PhaseMethod]:
    """Return the host's methods for a launch, and the wait for one."""
    return (part, "launch", "inputs"), (DeviceLaunch, "wait", "verify"), (part, "_outputs", "deliver")
