"""The peers' side of the protocol: JSON lines, one request and one reply, over stdin and stdout.

{"op": "load", ...} -> {"startup_s": ...}; {"op": "generate", ...} -> {"seconds": ...}; {"error": sentence} for a
failure. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Op = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Timed:
    """One generation of requests. Seconds count from the call; a step of a batch of 8 counts as 8 request-steps."""

    seconds: float = 0.0
    first_s: float = 0.0  # until every request had a token
    first_tokens: int = 0  # of the requests' first steps; several each if drafts are verified with the prompt
    request_steps: int = 0  # after each request's first step
    outputs: list[list[int]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Stopwatch:
    """Fills in a Timed while tokens come in, request by request."""

    def __init__(self, requests: int) -> None:
        self.timed = Timed(outputs=[[] for _ in range(requests)])
        self._waiting = requests
        self._start = time.perf_counter()

    def give(self, request: int, tokens: list[int]) -> None:
        """Add the tokens of one step of one request."""
        if not tokens:
            return
        output = self.timed.outputs[request]
        if output:
            self.timed.request_steps += 1
        else:
            self.timed.first_tokens += len(tokens)
            self._waiting -= 1
            if not self._waiting:
                self.timed.first_s = time.perf_counter() - self._start
        output += tokens

    def stop(self) -> dict[str, Any]:
        self.timed.seconds = time.perf_counter() - self._start
        return self.timed.to_dict()


@dataclass
class Queue:
    """The order of `count` requests. At most `at_once` run at once: when one ends, the next starts.

    at_once: None = all. running: number of requests that run; the caller subtracts those that have ended.
    """

    count: int
    at_once: int | None = None
    running: int = 0
    started: int = 0

    @property
    def has_work(self) -> bool:
        """False: all requests have ended."""
        return self.running > 0 or self.started < self.count

    def start(self) -> range:
        """The numbers of the requests to start now, which count as running."""
        room = self.count if self.at_once is None else self.at_once - self.running
        new = range(self.started, min(self.started + room, self.count))
        self.started, self.running = new.stop, self.running + len(new)
        return new


def serve(ops: Mapping[str, Op]) -> None:
    """Answer requests until stdin ends. Output of libraries goes to stderr, which is the log."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = ops[request.pop("op")](request)
        except Exception as error:  # the next request may still work, and the log has the rest
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stderr.flush()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
