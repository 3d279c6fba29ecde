"""The loop with a step in flight: the host prepares the next step while the device computes the last.

What a step draws is what the step after it reads in, and it need not pass through the host on its way: that step is
launched with a note of which row of the outputs each request continues (core.Carry). The host counts as if all drafts
were accepted, so that there are blocks enough; the lengths that hold are computed on the device. When the outputs of a
step come in, the step after it is in flight already, with requests that have just ended. What that gives them is thrown
away, and only when it has landed are their blocks free.

Where the host must know more than it does (blocks run short, a launch fails, a request's draws depend on the tokens
before them) it waits, and makes a step without looking ahead.
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
class Flight:
    """A step whose outputs the host has not seen."""

    batch: Batch
    spec: SpecMetadata
    launch: Launch


@dataclass
class OverlapLoop(IsolatedLoop):
    """For executables that need not be waited for, and drafts that are made inside the launch, if any.

    A call of step() launches a step and returns what the step before it gave.
    """

    target: AsyncExecutable
    flight: Flight | None = field(default=None, init=False)

    def step(self) -> list[Emission]:
        """Launch a step, and give what the one before it gave. A step that is not launched ahead is waited for."""
        flight, self.flight = self.flight, None
        batch = self.scheduler.schedule()
        if batch and not any(row.request.needs_host for row in batch):
            try:
                self.flight = self.take_off(batch, flight)
            except DeviceError:
                raise  # there is nothing left to try on
            except Exception:  # who is to blame shows when it is launched as others are, with nothing in flight
                pass
        if flight is None:
            return [] if self.flight is not None or not batch else super().step()
        try:
            outputs = flight.launch.wait()
        except DeviceError:
            raise
        except Exception:
            self.give_up(flight)
            return super().step()  # launches that fail are taken apart
        return self.land(flight, outputs)

    @property
    def has_work(self) -> bool:
        """False: no request is there, and nothing is in flight."""
        return self.flight is not None or super().has_work

    def take_off(self, batch: Batch, last: Flight | None) -> Flight:
        """Launch the batch behind the last step, if that is in flight."""
        wanted = self.proposer.wanted(batch, self.scheduler)
        inputs = self.assemble(batch, wanted)
        carry = None if last is None else self.assemble.carry(batch, last.batch)
        flight = Flight(batch, inputs.spec, self.target.launch(inputs, carry))
        self.scheduler.took_off(batch, [self.usable_drafts(row, wanted) for row in batch])
        return flight

    def usable_drafts(self, row: Scheduled, made: int) -> int:
        """How many of the drafts that a step makes for a request the next one may verify: as many as it wants, none
        past a gap in the draft KV, or where the draft model sees no further."""
        request = row.request
        if made == 0 or request.max_draft_len == 0 or not row.emits or row.end >= self.proposer.longest(self.scheduler):
            return 0
        if request.kv.draft_len < request.kv.committed:
            self.proposer.num_stale += 1
            return 0
        return min(made, request.max_draft_len)

    def land(self, flight: Flight, outputs: StepOutputs) -> list[Emission]:
        """A step is over: give its requests what they got."""
        if outputs.verdict is None:
            outputs = replace(outputs, verdict=accept(outputs, flight.spec))
        self.scheduler.landed(flight.batch)
        emissions = self.deliver(flight.batch, outputs)
        waiting = [e.request for e in emissions if e.tokens and not e.finished and not e.request.pending]
        self.proposer.propose(waiting, self.scheduler)
        return emissions

    def give_up(self, failed: Flight) -> None:
        """A step has failed, and with it the one that reads its outputs: as if neither had been launched."""
        self.scheduler.landed(failed.batch)
        flight, self.flight = self.flight, None
        if flight is not None:
            with suppress(Exception):
                flight.launch.wait()
            self.scheduler.landed(flight.batch)
