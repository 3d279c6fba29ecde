"""What the engine counts and times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.core import Carry, StepInputs, StepOutputs
from trtspec.methods.drafter import ChainExecutable
from trtspec.outputs import SpeculationStats
from trtspec.protocols import AsyncExecutable, Executable, Launch


class TimedExecutable:
    """An executable that adds up launches and the seconds spent in them; host time per step is what is left.

    `weight_bytes`: weights that one launch of it reads, and each pass of a chain; `kv_bytes`: its part of the KV pool.
    """

    def __init__(self, inner: Executable, weight_bytes: int, kv_bytes: int) -> None:
        self.inner = inner
        self.weight_bytes = weight_bytes
        self.kv_bytes = kv_bytes
        self.launches = 0
        self.bytes_read = 0  # weights
        self.seconds = 0.0

    def count(self, start: float, passes: int = 1) -> None:
        """A launch that began at `start`."""
        self.launches += 1
        self.bytes_read += passes * self.weight_bytes
        self.seconds += time.perf_counter() - start

    def run(self, inputs: StepInputs) -> StepOutputs:
        """See protocols.Executable."""
        start = time.perf_counter()
        try:
            return self.inner.run(inputs)
        finally:
            self.count(start)


class TimedAsyncExecutable(TimedExecutable):
    """As TimedExecutable; of a launch that is not waited for at once, the seconds are those of the host."""

    inner: AsyncExecutable

    def __init__(self, inner: AsyncExecutable, weight_bytes: int, kv_bytes: int) -> None:
        super().__init__(inner, weight_bytes, kv_bytes)

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> Launch:
        """See protocols.AsyncExecutable."""
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
        """See methods.drafter.ChainExecutable."""
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
    drafter_failures: int = 0  # calls that raised or answered nonsense
    stale_drafts: int = 0  # proposals dropped because the draft layers had missed rows before them
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0  # looked up in the cache: prompts, and what a preempted request must read in again
    prefix_hit_tokens: int = 0  # of those, found, so not computed
    output_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> samples
    saved_requests: int = 0  # whose hidden states are in finished files (SAVE_HIDDEN_STATES)
    unsaved_requests: int = 0  # whose hidden states are lost, because of save_error
    save_error: str | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)  # of finished samples
