"""ObservedCosts: step costs that follow how long steps really take."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from trtspec.engine.step_costs import Cell, StepCosts

RECENT = 32  # plain steps older than this many steps say nothing about the speed of the machine now
LAST = 9  # plain steps whose median is compared with
DECAY = 15 / 16  # of what steps with drafts said, for each such step ...
FADING = 0.5 ** (1 / 256)  # ... and for each plain step: so drafts are tried again some time
PRIOR = 0.25  # what the measured times count for, in steps with drafts that take twice as long as plain ones
FARTHEST = 3.0  # times what was measured for the drafts of a step: how far the step may be from that
UNIT = 0.1  # factors are e to a multiple of this; smaller differences are noise
MOST = 16  # of these multiples
SAMPLES = 3  # steps of a kind that is tried only to see how long it takes; plain steps to compare with, at least ...
ATTEMPTS = 12  # ... in at most so many launches, as not every step is timed
GAPS = {True: 32, False: 64}  # steps without plain ones, or without drafts, after which these are tried so ...
LONGEST_GAP = 2048  # ... four times as many each time, up to this


class ObservedCosts(StepCosts):
    """StepCosts, corrected by the steps since.

    Another program may have run next to the measurement, or may run now. Choices depend on how much longer a step with
    drafts takes than a plain one. That difference gets one factor for each batch size that was measured. A kind of step
    that was not chosen for many steps is tried now and then.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__(cells)
        self._observed = {size: _Observed() for size in self.batch_sizes}
        self._corrected: dict[tuple[int, int, int], list[float]] = {}

    def curve(self, made: int, batch: int, longest: int) -> list[float]:
        """Seconds as in StepCosts, [batch * longest + 1]. The factor scales the part above a plain step."""
        key = made, batch, longest
        if key not in self._corrected:
            self._corrected[key] = self._correct(key, self._observed[self.size_for(batch)].exponent)
        return self._corrected[key]

    def _correct(self, key: tuple[int, int, int], exponent: int) -> list[float]:
        measured = super().curve(*key)
        if not exponent:
            return measured
        plain, factor = super().curve(self.draft_lens[0], *key[1:])[0], math.exp(UNIT * exponent)
        return [plain + factor * (seconds - plain) for seconds in measured]

    def tries(self, batch: int) -> bool | None:
        """Kind of step that is to be tried now, to see how long it takes: True = plain, False = with drafts."""
        return self._observed[self.size_for(batch)].tried

    def count_try(self, batch: int) -> None:
        """Count a launch of the kind that `tries` names."""
        self._observed[self.size_for(batch)].count_try()

    def observe(self, made: int, batch: int, longest: int, verified: int, seconds: float) -> bool:
        """Note that a step took so long; return whether that changed the costs.

        verified: number of drafts of all requests. The rest is as in `curve`.
        """
        plain = super().curve(self.draft_lens[0], batch, longest)[0]
        more = super().curve(made, batch, longest)[verified] / plain - 1
        one = self._observed[self.size_for(batch)]
        before = one.exponent
        one.see(seconds / plain, max(more, 0.0) if made or verified else None)
        if one.exponent == before:
            return False
        self._corrected.clear()
        return True


class _Observed:
    """What the steps of a batch size said. Times are in units of the plain step that was measured.

    Kinds of steps: True = plain, False = with drafts.
    """

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=LAST)  # the last plain steps
        self.exponent = 0  # the factor's logarithm, in multiples of UNIT
        self.tried: bool | None = None  # kind that is wanted only to see how long it takes
        self._sums = 0.0, 0.0  # of least squares: the factor is the first over the second
        self._last_kind = True
        self._since = {True: 0, False: 0}  # steps since the last one of each kind
        self._gaps = dict(GAPS)
        self._missing = 0  # steps that are still wanted of the kind `tried` ...
        self._attempts = 0  # ... and launches that are left for them

    def see(self, took: float, more: float | None) -> None:
        """Note a step. Steps with drafts count where there were plain steps lately, to compare them with.

        The first step with drafts after a plain one does not count, as a draft model then reads all that it has missed.
        more: time that was measured of such a step over that of a plain step, minus 1; None = a plain step.
        """
        kind, before = more is None, self._last_kind
        self._last_kind = kind
        if not kind and before:
            return
        if more is None:
            if self._since[True] >= RECENT:
                self.plain.clear()
            self.plain.append(took)
            self._add(0.0, 0.0, FADING)
        elif self._since[True] < RECENT and len(self.plain) >= SAMPLES:
            found = took / statistics.median(self.plain) - 1
            found = min(max(found, more * (1 - FARTHEST)), more * (1 + FARTHEST))
            self._add(found * more, more * more, DECAY)
        self._choose(kind)

    def _add(self, product: float, square: float, decay: float) -> None:
        first, second = self._sums
        self._sums = first, second = first * decay + product, second * decay + square
        factor = (first + PRIOR) / (second + PRIOR)
        wanted = math.log(max(factor, 0.01)) / UNIT
        if abs(wanted - self.exponent) > 0.75:  # else a factor between two multiples changes with every step
            self.exponent = min(max(round(wanted), -MOST), MOST)

    def count_try(self) -> None:
        """Count a launch of the kind that is tried, and give up after ATTEMPTS."""
        self._attempts -= 1
        if self._attempts <= 0:
            self.tried = None

    def _choose(self, kind: bool) -> None:
        """Note the kind of a step, and choose what to try."""
        other = not kind
        self._since[kind] = 0
        self._since[other] += 1
        if self.tried == kind:
            self._missing -= 1
            self.tried = kind if self._missing else None
        elif self.tried is None and self._since[other] >= self._gaps[other]:
            self.tried, self._missing, self._attempts = other, SAMPLES, ATTEMPTS
            self._gaps[other] = min(4 * self._gaps[other], LONGEST_GAP)
