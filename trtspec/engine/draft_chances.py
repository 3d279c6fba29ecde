"""How likely drafts are accepted, by what was accepted so far."""

from __future__ import annotations


class Counts:
    """Decayed numbers of drafts that were verified, and of those that were accepted, at each position, [K]."""

    def __init__(self, length: int, decay: float) -> None:
        self.verified = [0.0] * length
        self.accepted = [0.0] * length
        self.decay = decay

    def observe(self, verified: int, accepted: int) -> None:
        """Count the drafts of a step. A draft after one that was not accepted says nothing."""
        self.fade(self.decay)
        for j in range(min(verified, accepted + 1)):
            self.verified[j] += 1
            self.accepted[j] += j < accepted

    def fade(self, part: float) -> None:
        """Make everything that was counted so far count for `part` of what it did."""
        self.verified = [count * part for count in self.verified]
        self.accepted = [count * part for count in self.accepted]


def share_of(counts: Counts, position: int, expected: float, weight: float) -> float:
    """Share of the drafts that were accepted at a position. `expected` counts like `weight` drafts."""
    return (counts.accepted[position] + weight * expected) / (counts.verified[position] + weight)
