"""What the scores of drafts say of their chances. A score is the probability that the draft layers give their draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, repeat

BINS = 10  # of scores, from 0 to 1
DECAY = 0.995  # of a bin's counts, for each draft in it that is verified
WEIGHT = 4.0  # number of drafts that a score counts for: until more are counted, it is taken for the chance itself
HIGHEST = 0.995  # chance of any draft
PARTS = 8  # into which the offers are divided, from the least likely to the likeliest
OFFERS = 64  # number of offers of drafts from which the spread is computed


class DraftScores:
    """What was learnt of the scores of all requests.

    spread: [K][PARTS], by position the mean chance of each part of some recent offers, over that of all. A chance is
    that of a draft and all before it. Empty until enough offers were seen.
    """

    def __init__(self) -> None:
        self._verified = [0.0] * (BINS + 1)  # the last one is of scores of 1
        self._accepted = [0.0] * (BINS + 1)
        self._offers: list[list[float]] = []
        self.spread: list[tuple[float, ...]] = []

    def chance(self, score: float) -> float:
        """Chance that a draft with this score is accepted if those before it are. A score of NaN counts as 0."""
        score = score if 0 <= score <= 1 else 0.0
        at = int(score * BINS)
        return (self._accepted[at] + WEIGHT * score) / (self._verified[at] + WEIGHT)

    def observe(self, score: float, accepted: bool) -> None:
        """Count a draft that was verified after others that were accepted."""
        at = int(score * BINS) if 0 <= score <= 1 else 0
        self._verified[at] = self._verified[at] * DECAY + 1
        self._accepted[at] = self._accepted[at] * DECAY + accepted

    def see_offer(self, chances: list[float]) -> None:
        """Note the chances of the drafts of one request."""
        self._offers.append(chances)
        if len(self._offers) == OFFERS:
            self.spread = []
            for j in range(max(map(len, self._offers))):
                ordered = sorted(offer[j] for offer in self._offers if len(offer) > j)
                self.spread.append(_parts(ordered) if len(ordered) >= 2 * PARTS else self.spread[-1])
            self._offers = []


def _parts(ordered: Sequence[float]) -> tuple[float, ...]:
    """Means of equal parts of the ordered values, over the mean of all."""
    count, mean = len(ordered), sum(ordered) / len(ordered)
    if not mean:
        return (1.0,) * PARTS
    bounds = [count * part // PARTS for part in range(PARTS + 1)]
    return tuple(sum(ordered[low:high]) / (high - low) / mean for low, high in pairwise(bounds))


Level = tuple[float, float, int]
"""Drafts at one position that are about as likely: their chance, how many there are, and the position."""


def levels_of(
    chances: Sequence[Sequence[float]], spread: Sequence[Sequence[float]], longest: int
) -> tuple[list[Level], list[float]]:
    """The drafts of all requests, as far apart as scores will tell them, and the sum of chances at each position.

    The likeliest come first. chances: of each request. longest: number of positions, at most.
    """
    levels: list[Level] = []
    sums: list[float] = []
    for j, ratios in zip(range(min(max(map(len, chances)), longest)), chain(spread, repeat(spread[-1])), strict=False):
        own = [one[j] for one in chances if len(one) > j]
        mean, count = sum(own) / len(own), len(own) / len(ratios)
        parts = [min(mean * ratio, HIGHEST) for ratio in ratios]
        sums.append(sum(parts) * count)
        levels += [(chance, count, j) for chance in parts]
    levels.sort(reverse=True)
    return levels, sums
