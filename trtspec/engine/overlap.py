"""Overlap scheduling: the host prepares the next step while the device computes the current one.

The tokens of a step are the inputs of the next step, and they stay on the device. `carry.Carry` says which output row
each request continues. The host reserves KV blocks as if every draft were accepted; the device computes the true
lengths. When the outputs of a step arrive, the next step is already in flight and may include requests that have just
finished. Their tokens are discarded, and their blocks are freed when that step completes.

The host waits for the step in flight when it needs the outputs first. That is so if KV blocks run short, if a launch
fails, or if a request's logit constraints depend on the previous tokens. It is also so if a tree may be deeper than its
request allows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from trtspec.core import SpecMetadata, StepOutputs
from trtspec.engine.faults import IsolatedLoop
from trtspec.engine.scheduler import Batch, Scheduled
from trtspec.engine.step import Emission
from trtspec.errors import DeviceError
from trtspec.protocols import AsyncExecutable, Launch
from trtspec.verify.strict import accept


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose outputs the host has not read."""

    batch: Batch
    spec: SpecMetadata
    launch: Launch


@dataclass
class OverlapLoop(IsolatedLoop):
    """The loop for an asynchronous executable without a separate drafter.

    step() launches one step and returns the emissions of the previous one.
    """

    target: AsyncExecutable
    in_flight: InFlightStep | None = field(default=None, init=False)

    def step(self) -> list[Emission]:
        """Launch the next step, then return the emissions of the one in flight.

        A step that cannot be launched ahead runs alone, and its own emissions are returned.
        """
        previous, self.in_flight = self.in_flight, None
        batch = self.scheduler.schedule()
        if batch and not any(row.request.needs_host for row in batch) and not self.has_too_deep_trees(batch, previous):
            try:
                self.in_flight = self.launch_ahead(batch, previous)
            except DeviceError:
                raise  # the device is lost
            except Exception:  # launched again below, with nothing in flight: fault isolation finds the request
                pass
        if previous is None:
            return [] if self.in_flight is not None or not batch else super().step()
        try:
            outputs = previous.launch.wait()
        except DeviceError:
            raise
        except Exception:
            self.abandon(previous)
            return super().step()  # which isolates the request at fault
        return self.complete(previous, outputs)

    @property
    def has_work(self) -> bool:
        """False: there is no request, and no step is in flight."""
        return self.in_flight is not None or super().has_work

    def launch_ahead(self, batch: Batch, last: InFlightStep | None) -> InFlightStep:
        """Launch the batch; where `last` is in flight, the device takes its outputs as inputs."""
        wanted = self.proposer.wanted(batch, self.scheduler)
        inputs = self.input_builder.build(batch, wanted)
        carry = None if last is None else self.input_builder.carry(batch, last.batch)
        launched = InFlightStep(batch, inputs.spec, self.target.launch(inputs, carry))
        self.scheduler.mark_in_flight(batch, [self.usable_drafts(row, wanted) for row in batch])
        return launched

    def has_too_deep_trees(self, batch: Batch, last: InFlightStep | None) -> bool:
        """Whether the host has to cut trees of `last`, as a request of the batch wants a smaller depth."""
        if last is None:
            return False
        made = max(last.spec.runtime_draft_len, last.spec.next_draft_len)  # a graph makes as many as it verifies
        deepest = self.proposer.depth_of_trees(made)
        return any(row.draft_len > 0 and row.request.max_draft_len < deepest for row in batch)

    def usable_drafts(self, row: Scheduled, made: int) -> int:
        """Number of the `made` drafts that the next step may verify for this request.

        0 where the draft KV has a gap, or where the sequence is longer than the draft model's context.
        """
        request = row.request
        if made == 0 or request.max_draft_len == 0 or not row.emits or row.end >= self.proposer.longest(self.scheduler):
            return 0
        if request.kv.draft_kv_len < request.kv.committed:
            self.proposer.num_stale += 1
            return 0
        return min(made, self.proposer.num_drafts(request.max_draft_len))

    def complete(self, step: InFlightStep, outputs: StepOutputs) -> list[Emission]:
        """Commit a step's outputs to its requests."""
        if outputs.verdict is None:
            outputs = replace(outputs, verdict=accept(outputs, step.spec))
        self.scheduler.mark_completed(step.batch)
        emissions = self.deliver(step.batch, outputs)
        waiting = [e.request for e in emissions if e.tokens and not e.finished and not e.request.pending]
        self.proposer.propose(waiting, self.scheduler)
        self.release_samples(emissions)
        return emissions

    def abandon(self, failed: InFlightStep) -> None:
        """Undo the launch of a step that failed, and of the step in flight, which reads its outputs."""
        self.scheduler.mark_completed(failed.batch)
        dependent, self.in_flight = self.in_flight, None
        if dependent is not None:
            with suppress(Exception):
                dependent.launch.wait()
            self.scheduler.mark_completed(dependent.batch)
