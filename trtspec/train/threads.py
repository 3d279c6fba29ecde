"""How many threads a step of training runs on, where other programs want the same cores.

torch's threads divide each operation evenly and wait for the last of them. One whose core another program uses is
waited for at every operation, and a step takes several times as long as it does without that thread.
"""

from __future__ import annotations

from types import TracebackType

import torch
from typing_extensions import Self

SLOW = 0.4
"""A share of the best speed: a step below it has others to share with. What a step has to do varies less."""

REST = (4, 32)
"""Steps on fewer threads until all of them are tried again: the first time, and at most. Each time that they are still
slower doubles it."""


class Threads:
    """Used with `with`, which leaves as many as there were. Each step: `begin`, and then how fast it was."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most or torch.get_num_threads()
        fewer = {self.most - 1, self.most // 2} - {0, self.most}
        self.fewer = sorted(fewer, reverse=True)
        self.now = self.most
        self._best = 0.0  # on all of them
        self._speeds: dict[int, float] = {}  # of those tried since it became slow
        self._steps, self._rest = 0, REST[0] // 2  # doubled when fewer are taken
        self._untried = [self.most, *self.fewer] if self.fewer else []  # the first step warms up, and tells nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self.most)

    def begin(self) -> None:
        """Call it before a step: sets the number of threads."""
        torch.set_num_threads(self.now)

    def end(self, speed: float) -> None:
        """speed: of the step, in anything per second. Decides on how many threads the next one runs."""
        self._steps += 1
        if self._steps == 1 or not self.fewer:
            return
        self._speeds[self.now] = speed
        if self.now == self.most:
            self._best = max(self._best, speed)
        if self._untried and self._untried[0] == self.now:
            self._untried.pop(0)
        if self._untried:
            self.now = self._untried[0]
            return
        if len(self._speeds) > 1:  # all have been tried
            self.now = max(self._speeds, key=self._speeds.__getitem__)
            self._best = self._speeds.get(self.most, self._best)  # steps may have more to do than before
            self._rest = REST[0] // 2 if self.now == self.most else min(2 * self._rest, REST[1])
            self._speeds, self._steps = {}, 1
        elif self.now == self.most and speed < SLOW * self._best:
            self._untried = list(self.fewer)
            self.now = self._untried[0]
        elif self.now != self.most and self._steps > self._rest:
            self._speeds, self._untried = {self.now: speed}, [self.most]
            self.now = self.most
