"""Fault isolation: the batch of a launch that raises is halved until the request at fault is alone.

This is sound because a launch commits nothing. It only writes KV rows past those that its requests have committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trtspec.core import StepOutputs
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch
from trtspec.engine.step import Emission, StepLoop
from trtspec.errors import DeviceError

Outputs = TypeVar("Outputs")


class LaunchFailed(Exception):
    """The failure of a launch, which raised `error`. Nothing of its batch was committed."""

    def __init__(self, batch: Batch, error: Exception) -> None:
        super().__init__(batch, error)
        self.batch, self.error = batch, error


class IsolatedLoop(StepLoop):
    """The loop with fault isolation.

    A request that cannot be launched ends with an error; the rest of its batch runs.
    """

    def step(self) -> list[Emission]:
        """Run one step of every request that can run."""
        try:
            return super().step()
        except LaunchFailed as failed:
            return self.step_apart(failed.batch, failed.error)

    def launch(self, batch: Batch) -> StepOutputs:
        """Launch the target once. LaunchFailed if that raises, unless the device is lost."""
        try:
            return super().launch(batch)
        except DeviceError:
            raise  # the device is lost
        except Exception as error:
            raise LaunchFailed(batch, error) from error

    def step_apart(self, batch: Batch, error: Exception) -> list[Emission]:
        """Finish a step whose launch raised `error`: launch its batch in parts."""
        done, failed = take_apart(batch, error, super().launch)
        emissions = [self.fail(request, error) for request, error in failed]
        for part, outputs in done:
            emissions += self.deliver(part, outputs)
        self.propose(emissions)
        return emissions

    def fail(self, request: Request, error: Exception) -> Emission:
        """End a request that cannot be launched."""
        context = request.is_context
        request.fail(error)
        self.remove(request)
        return Emission(request, [], "", 0, 0, context, finished=True)


Parts = tuple[list[tuple[Batch, Outputs]], list[tuple[Request, Exception]]]
"""Outputs of the (part) batches that ran, and the requests that cannot run, each with its exception."""


def launch_isolated(batch: Batch, launch: Callable[[Batch], Outputs]) -> Parts[Outputs]:
    """Launch the batch. If that raises, launch it in parts."""
    try:
        return [(batch, launch(batch))], []
    except DeviceError:
        raise  # the device is lost
    except Exception as error:
        return take_apart(batch, error, launch)


def take_apart(batch: Batch, error: Exception, launch: Callable[[Batch], Outputs]) -> Parts[Outputs]:
    """Launch both halves of a batch whose launch raised `error`. A batch of a single request is not launched again."""
    if len(batch) == 1:
        return [], [(batch[0].request, error)]
    middle = len(batch) // 2
    first, first_failed = launch_isolated(batch[:middle], launch)
    second, second_failed = launch_isolated(batch[middle:], launch)
    return first + second, first_failed + second_failed
