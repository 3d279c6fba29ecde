"""One request's failure stays its own: a launch that raises is halved until the culprit stands alone.

That is sound because a launch commits nothing: it only writes KV rows past what its requests have committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch
from trtspec.errors import DeviceError

Outputs = TypeVar("Outputs")


def launch_isolated(
    batch: Batch, launch: Callable[[Batch], Outputs]
) -> tuple[list[tuple[Batch, Outputs]], list[tuple[Request, Exception]]]:
    """Outputs of the (part) batches that ran, and the requests that cannot run, each with its exception."""
    try:
        return [(batch, launch(batch))], []
    except DeviceError:
        raise  # there is nothing left to try on
    except Exception as error:
        if len(batch) == 1:
            return [], [(batch[0].request, error)]
    middle = len(batch) // 2
    first, first_failed = launch_isolated(batch[:middle], launch)
    second, second_failed = launch_isolated(batch[middle:], launch)
    return first + second, first_failed + second_failed
