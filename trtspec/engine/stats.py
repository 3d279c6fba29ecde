"""Counters and timers of the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.carry import Carry
from trtspec.core import StepInputs, StepOutputs
from trtspec.methods.drafter import ChainExecutable
from trtspec.outputs import SpeculationStats
from trtspec.protocols import AsyncExecutable, Executable, Launch


class TimedExecutable:
    """An executable that counts its launches and adds up their seconds. The rest of a step's time is host time.

    `weight_bytes`: bytes of weights that one launch, or each pass of a chain, reads. `kv_bytes`: its part of the KV
    pool.
    """

    def __init__(self, inner: Executable, weight_bytes: int, kv_bytes: int) -> None:
        self.inner = inner
        self.weight_bytes = weight_bytes
        self.kv_bytes = kv_bytes
        self.launches = 0
        self.bytes_read = 0  # of weights
        self.seconds = 0.0

    def count(self, start: float, passes: int = 1) -> None:
        """Count a launch that began at `start` and made `passes` passes."""
        self.launches += 1
        self.bytes_read += passes * self.weight_bytes
        self.seconds += time.perf_counter() - start

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run a step and time it; otherwise as protocols.Executable."""
        start = time.perf_counter()
        try:
            return self.inner.run(inputs)
        finally:
            self.count(start)


class TimedAsyncExecutable(TimedExecutable):
    """A TimedExecutable that can launch.

    If a launch is not waited for at once, its seconds are those that the host spends on it.
    """

    inner: AsyncExecutable

    def __init__(self, inner: AsyncExecutable, weight_bytes: int, kv_bytes: int) -> None:
        super().__init__(inner, weight_bytes, kv_bytes)

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> Launch:
        """Launch a step and time it; otherwise as protocols.AsyncExecutable."""
        start = time.perf_counter()
        try:
            return _TimedLaunch(self, self.inner.launch(inputs, carry))
        finally:
            self.count(start)


class TimedChain:
    """A chain whose launches are counted as those of its model."""

    def __init__(self, inner: ChainExecutable, model: TimedExecutable) -> None:
        self.inner, self.model = inner, model

    def run_chain(self, inputs: StepInputs, num_tokens: int) -> Tensor | None:
        """Run a chain and count its launch; otherwise as methods.drafter.ChainExecutable."""
        start = time.perf_counter()
        drafts = self.inner.run_chain(inputs, num_tokens)
        if drafts is not None:
            self.model.count(start, num_tokens)
        return drafts


class _TimedLaunch:
    def __init__(self, owner: TimedAsyncExecutable, inner: Launch) -> None:
        self.owner, self.inner = owner, inner

    def wait(self) -> StepOutputs:
        start = time.perf_counter()
        try:
            return self.inner.wait()
        finally:
            self.owner.seconds += time.perf_counter() - start


@dataclass
class EngineStats:
    """Totals since the engine started. Times in seconds."""

    steps: int = 0
    step_time: float = 0.0
    launch_time: float = 0.0  # inside Executable.run of target and draft
    preemptions: int = 0
    drafter_failures: int = 0  # calls that raised or returned an invalid proposal
    stale_drafts: int = 0  # proposals dropped because the draft layers had missed earlier rows
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0  # looked up in the cache: prompts, and what preempted requests prefill again
    prefix_hit_tokens: int = 0  # those that were found, and so not computed
    output_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> samples
    saved_requests: int = 0  # with hidden states in finished files (SAVE_HIDDEN_STATES)
    unsaved_requests: int = 0  # with hidden states that are lost because of save_error
    save_error: str | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)  # of finished samples
