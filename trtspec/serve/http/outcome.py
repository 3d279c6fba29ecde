"""The outcome of a request, through which its handlers add to its record (request_log.py) from any function."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Outcome:
    """The outcome of an HTTP request.

    error: a word for an error before generation. generation: its service.HTTPGeneration, once it runs.
    """

    error: str | None = None
    generation: Any = None


CURRENT: ContextVar[Outcome | None] = ContextVar("request", default=None)


def current() -> Outcome | None:
    """Outcome of the request that is being handled; None outside a request."""
    return CURRENT.get()
