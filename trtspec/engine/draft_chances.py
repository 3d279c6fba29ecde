"""How likely drafts are accepted, by what was accepted so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LARGEST_UNIT = 1e100


class Outcome(NamedTuple):
    """A request's part of a step that verified drafts.

    source: its id; or ~id if its grammar made the drafts, or if they were looked up next to draft layers.
    """

    source: int
    verified: int
    accepted: int


class Offer(NamedTuple):
    """Drafts of a request that the next launch may verify.

    source: as in Outcome. length: number of drafts. scores: [length], the probability that the draft layers give each
    draft after those before it; () = not known.
    """

    source: int
    length: int
    scores: Sequence[float] = ()


class Counts:
    """Decayed numbers of drafts that were verified, and of those that were accepted, at each position, [K].

    Earlier counts do not become smaller. Instead each new count is larger: `_unit` is the weight of the latest.
    """

    def __init__(self, length: int, decay: float) -> None:
        self._verified = [0.0] * length
        self._accepted = [0.0] * length
        self._unit = 1.0
        self._decay = decay

    def observe(self, verified: int, accepted: int, expected: Sequence[float] = ()) -> None:
        """Count the drafts of a step. A draft after one that was not accepted says nothing.

        expected: chance of each draft that there was. Those that were not verified count as much as they would have.
        """
        self.fade(self._decay)
        unit = self._unit
        for j in range(min(verified, accepted + 1)):
            self._verified[j] += unit
            if j < accepted:
                self._accepted[j] += unit
        if accepted == verified:
            for j in range(verified, len(expected)):
                self._verified[j] += unit
                unit *= expected[j]
                self._accepted[j] += unit

    def fade(self, part: float) -> None:
        """Make everything that was counted so far count for `part` of what it did."""
        self._unit /= part
        if self._unit > LARGEST_UNIT:
            self._verified = [count / self._unit for count in self._verified]
            self._accepted = [count / self._unit for count in self._accepted]
            self._unit = 1.0

    def shares(self, expected: Sequence[float], weight: float) -> list[float]:
        """Share of the drafts that were accepted at each position, [K]. What is expected counts like `weight` drafts.

        Where a request does better or worse at a position than expected, so it is expected to do at the next one.
        """
        found, prior, better = [], weight * self._unit, 1.0
        for own, verified, general in zip(self._accepted, self._verified, expected, strict=True):
            share = min(general * better, 1.0)
            share = (own + prior * share) / (verified + prior)
            better = share / general
            found.append(share)
        return found
