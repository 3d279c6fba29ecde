"""Choice of the number of threads for a step of training, where other programs want the same cores.

torch divides each operation evenly among its threads and waits for the last of them. If another program uses a thread's
core, every operation waits for that thread. A step then takes several times as long as it does without the thread.
"""

from __future__ import annotations

from types import TracebackType

import torch
from typing_extensions import Self

SLOW = 0.4
"""Share of the best speed, below which a step is taken to share its cores with other programs.

The work of a step varies less than this.
"""

REST = (4, 32)
"""Steps on fewer threads until all threads are tried again: the first time, and at most.

The number doubles each time that all threads are still slower.
"""


class Threads:
    """A choice of torch's number of threads for each step; used as a context manager, which restores the full number.

    Each step calls `begin` before it, and `end` with its speed after it.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most or torch.get_num_threads()
        fewer = {self.most - 1, self.most // 2} - {0, self.most}
        self.fewer = sorted(fewer, reverse=True)
        self.now = self.most
        self._best = 0.0  # with all threads
        self._speeds: dict[int, float] = {}  # by number of threads, since the last choice
        self._steps, self._rest = 0, REST[0] // 2  # doubled when fewer threads are chosen
        self._untried = [self.most, *self.fewer] if self.fewer else []  # the first step only warms up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self.most)

    def begin(self) -> None:
        """Set the number of threads for the step that follows."""
        torch.set_num_threads(self.now)

    def end(self, speed: float) -> None:
        """Choose the number of threads for the next step.

        speed: speed of the step that has ended, in any unit per second.
        """
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
        if len(self._speeds) > 1:  # all numbers have been tried
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
