"""DraftHistory: what DraftLength knows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtspec.engine.draft_chances import Counts

WEIGHT = 5.0  # of the expected share, in drafts ...
SURPRISED_WEIGHT = 2.0  # ... and in a request whose drafts once did otherwise
KEPT = 0.1  # of a request's counts, when its drafts are tried again after a rest or have surprised
SHARED_KEPT = 0.5  # of the counts of all requests, when one has surprised
SURPRISE = 0.01  # likelihood of a run of outcomes below which what was counted before is out of date
FIRST_REST = 16  # steps without drafts until they are tried again; doubled while that does not pay ...
LONGEST_REST = 64  # ... up to this
RATIO_WEIGHT = 4.0  # number of accepted drafts, as many as expected, that a request begins with


@dataclass
class DraftHistory:
    """What is known of a request.

    A request whose drafts do not pay rests: it drafts nothing for a number of steps. Then drafts are tried again.
    """

    counts: Counts
    shared: Counts  # those of all requests
    chances: list[float]  # [K], that a draft and all before it are accepted
    rest: int = 0  # steps until drafts are tried again; 0: they are used where they pay
    rest_batch: int = 0  # requests of the batch in which the rest began
    next_rest: int = FIRST_REST  # steps of the next rest
    probe: int = 0  # steps of an attempt that are left: drafts are verified whether they pay or not
    offered: bool = False  # whether there were drafts for the next step
    skipped: int = 0  # offers in a row of which none was verified, of drafts that are not its drafter's
    accepts: bool = True  # whether the last first draft was accepted
    weight: float = WEIGHT  # of the expected share, in drafts
    times: int = 0  # number of equal outcomes in a row ...
    run: float = 1.0  # ... and how likely they were
    scores: Sequence[float] = ()  # of the drafts that the next launch may verify ...
    expected: Sequence[float] = ()  # ... and the chance of each if those before it are accepted; () = no scores
    hits: float = RATIO_WEIGHT  # drafts with scores that were accepted ...
    hits_expected: float = RATIO_WEIGHT  # ... and how many were expected to be

    def see_run(self, accepted: bool) -> None:
        """Note whether a first draft was accepted.

        A run of equal outcomes that was unlikely says that the text changed. Earlier counts then count little, and
        those of all requests count less.
        """
        first = self.expected[0] if self.expected else self.chances[0]
        chance = first if accepted else 1 - first
        going_on = accepted == self.accepts
        self.times, self.run = (self.times + 1, self.run * chance) if going_on else (1, chance)
        self.accepts = accepted
        if self.times > 1 and self.run < SURPRISE:
            self.counts.fade(KEPT)
            self.shared.fade(SHARED_KEPT)
            self.weight = SURPRISED_WEIGHT
            self.times, self.run = 0, 1.0

    def begin_rest(self, batch: int, shortest: int) -> None:
        """Begin a rest of at least `shortest` steps. `next_rest` doubles, up to LONGEST_REST."""
        self.rest, self.rest_batch = max(self.next_rest, shortest), batch
        self.next_rest = min(2 * self.next_rest, LONGEST_REST)
