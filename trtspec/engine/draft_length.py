"""Chooses how many drafts a step makes and verifies, so that speculation is used where it saves time.

Two decisions are made before each launch. `make`: how many drafts the launch makes for each request. `verify`: how many
of its drafts each request verifies. Both maximise the expected tokens per second of the batch. The time of a step comes
from StepCosts. The chance that drafts are accepted comes from what was accepted so far, the latest steps counting most.
Where draft layers score their drafts, `verify` goes by the scores. Before there are scores, `make` expects
the chances of requests to spread around their mean as in the latest steps.

Decisions follow from calls alone, those of `time` included. So a recorded trace gives the same decisions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul
from typing import Any

from trtspec.engine.draft_chances import Counts, Offer, Outcome
from trtspec.engine.draft_history import FIRST_REST, KEPT, LONGEST_REST, RATIO_WEIGHT, WEIGHT, DraftHistory
from trtspec.engine.draft_scores import HIGHEST, DraftScores, Level, levels_of
from trtspec.engine.step_costs import StepCosts

DECAY = 0.93  # of a request's counts at all positions, for each step that is counted
SHARED_DECAY = 0.99  # the same of the counts of all requests, which are what is expected of a new one
FIRST_GUESS = 0.7  # share of the drafts at each position that is expected to be accepted, before any was verified
PLAIN = 0.03  # of the rate, that drafts must gain
MARGIN = 0.02  # of the rate: what another choice must gain
PROBE_STEPS = 1  # in a row, in which drafts are tried again
PROBE_DRAFTS = 2  # most drafts of an attempt, where drafts are looked up
LOOK_EVERY = 16  # launches between two lookups of a request that rests
ATTEMPTS = 0.01  # share of the time that attempts may lose: rests are longer where they lose more
RATIO_DECAY = 0.9  # of what a request accepted and was expected to accept by its scores, for each step that verifies


class DraftLength:
    """The decisions, for one engine.

    costs: its draft_lens are what the launch, or a draft model after it, can make; 0 first. draft_lens = (0,) means
    that drafts are looked up: `make` gives 0, all that are found are offered to `verify`, and `asks` says who looks up.
    most: K, the most drafts that a request verifies.
    """

    def __init__(self, costs: StepCosts, most: int) -> None:
        self.costs = costs
        self.most = most
        self._launches = 0  # calls of make
        self.made = 0  # the last decision of make ...
        self._preferred = 0  # ... and of the last launch that was not made to see how long it takes
        self.trace: list[tuple[str, tuple[Any, ...], object]] | None = None  # calls and results; None: not recorded
        self._last_asked: tuple[tuple[int, ...], int] = (), 0  # arguments and result of _could_pay
        self._last_answer = False
        self._last_offers: tuple[list[Offer], int, list[int]] | None = None  # arguments and result of the last verify
        self._seen: Sequence[Offer] = ()  # the last offers, until there are outcomes
        # what is expected of drafts that a drafter makes, and of those of grammars and of lookups next to a model
        self._shared = {other: Counts(most, SHARED_DECAY) for other in (False, True)}
        self._scores = DraftScores()
        self._requests: dict[int, DraftHistory] = {}

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up."""
        return len(self.costs.draft_lens) == 1

    def asks(self, request_id: int, batch: int) -> bool:
        """Whether to ask the drafter for drafts of a request, so that `verify` may choose them.

        True for drafts that are not looked up. Looking up takes time, so a request that rests does not ask, and none
        does where no drafts could pay. A rest is a pause after drafts that failed. All requests ask in steps that
        measure times. They also do at every 16th launch, as a drafter may search the text of other requests.
        """
        if not self.looks_up or self._launches % LOOK_EVERY == 0 or self.costs.tries(batch) is False:
            return True
        known, hopeless = self._requests.get(request_id), self._last_asked[1] == batch and not self._last_answer
        return known is None or not (known.rest or hopeless)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count what a step accepted."""
        self._last_offers, self._seen = None, ()
        counted = [(self._of(source), verified, accepted) for source, verified, accepted in outcomes if verified]
        for known, verified, accepted in counted:
            known.see_run(accepted > 0)
            if known.expected:
                self._see_scores(known, verified, accepted)
        self._count(counted)
        self._record("observe", (list(outcomes),), None)

    def make(self, limits: Sequence[tuple[int, int]], batch: int) -> int:
        """Number of drafts that the next launch, or the draft model after it, makes for each request.

        Call it once for each launch.

        limits: ids of the requests that speculate, and the most drafts that each verifies. batch: number of all
        requests of the launch.
        """
        pairs = [(self._of(request_id), limit) for request_id, limit in limits]
        self._launches += 1
        self._last_offers = None
        tried = self.costs.tries(batch) if any(limit for _, limit in pairs) else None
        if tried:
            self.made = 0  # and nobody's rest goes on
        else:
            self.made = self._preferred = self._make(pairs, batch)
            if tried is False and not self.made:
                self.made = self.costs.draft_lens[not self.looks_up]
        if tried is not None:
            self.costs.count_try(batch)
        self._record("make", (list(limits), batch), self.made)
        return self.made

    def verify(self, drafts: Sequence[Offer], batch: int) -> list[int]:
        """Number of drafts that each request verifies in the next launch, which has `batch` requests.

        drafts: those of each request that speculates. Asking again with the same offers changes no counts.
        """
        offers = list(drafts)
        if self._last_offers is None or self._last_offers[:2] != (offers, batch):
            self._last_offers = offers, batch, self._verify_offers(offers, batch)
        lengths = self._last_offers[2]
        self._record("verify", (offers, batch), lengths)
        return lengths

    def _verify_offers(self, drafts: Sequence[Offer], batch: int) -> list[int]:
        known = [(self._of(source), min(count, self.most)) for source, count, _ in drafts]
        seen, self._seen = drafts == self._seen, drafts
        for (one, count), offer in zip(known, drafts, strict=True):
            self._expect(one, offer.scores[:count])
            if one.expected and not seen:
                self._scores.see_offer([*accumulate(one.expected, mul)])
            own = self._requests.get(~offer.source) if offer.source < 0 else None
            if own is not None:  # this time its drafts are not from its drafter
                own.expected, own.scores = (), ()
        lengths = self._verify(known, batch)
        for i, (offer, (one, count)) in enumerate(zip(drafts, known, strict=True)):
            if offer.source >= 0:
                continue
            if lengths[i]:
                one.skipped, one.next_rest = 0, FIRST_REST
                continue
            one.skipped += 1  # there are no rests for these, as they draft now and then
            if one.skipped >= one.next_rest:
                lengths[i], one.skipped, one.next_rest = count, 0, min(2 * one.next_rest, LONGEST_REST)
        self._count(
            [(one, 0, 0) for (one, _), length in zip(known, lengths, strict=True) if one.expected and not length]
        )
        return lengths

    def time(self, verified: Sequence[int], seconds: float) -> None:
        """Note how long the step of the last `make` took. Leave out steps with context rows.

        verified: the number of drafts that each request of the batch verified.
        """
        made = self._graph(max(self.made, *verified))
        if self.costs.observe(made, len(verified), self.most, sum(verified), seconds):
            self._last_asked = (), 0
        self._record("time", (list(verified), seconds), None)

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request that has ended."""
        self._requests.pop(request_id, None)
        self._requests.pop(~request_id, None)
        self._record("forget", (request_id,), None)

    def _make(self, pairs: Sequence[tuple[DraftHistory, int]], batch: int) -> int:
        limits = tuple([limit for _, limit in pairs])
        most = max(limits, default=0)
        if most == 0:
            return 0
        could_pay = self._could_pay(limits, batch)
        if could_pay and all(known.rest > 1 and batch >= known.rest_batch for known, _ in pairs):
            for known, _ in pairs:
                known.rest -= 1
            return 0
        self._wake([known for known, _ in pairs], could_pay)
        lengths = [made for made in self.costs.draft_lens if made <= most]
        if not self.looks_up and lengths[-1] < most:
            lengths.append(self._graph(most))
        # a rest is as good as over if the batch has become smaller
        chances = [[] if known.rest and batch >= known.rest_batch else known.chances[:limit] for known, limit in pairs]
        spread = self._scores.spread
        best, score, least = 0, 0.0, 2.0
        levels, sums = levels_of(chances, spread, lengths[-1]) if spread else ([], [])
        for made in lengths:
            bonus = self._bonus(made)
            if not spread:
                rate, needed = self._best(made, batch, chances if self.looks_up else [one[:made] for one in chances])
            elif (batch + sum(sums[:made])) * bonus <= score * self.costs.curve(made, batch, self.most)[0]:
                continue  # not even if all these drafts took no time
            else:
                rate, needed = self._best_of_levels(made, batch, levels, sums)
            if rate * bonus > score:
                best, score, least = made, rate * bonus, needed
        for known, limit in pairs:
            likeliest = min(known.chances[0] * spread[0][-1], HIGHEST) if spread else known.chances[0]
            if limit and (best > 0 or self.looks_up) and likeliest >= least:
                known.rest, known.next_rest = 0, FIRST_REST
            elif known.rest:
                known.rest_batch = min(known.rest_batch, batch)
            elif could_pay and not known.probe:
                known.begin_rest(batch, self._shortest_rest(batch))
        probes = could_pay and not self.looks_up and any(known.probe > 1 for known, _ in pairs)
        return best or (self.costs.draft_lens[1] if probes else 0)

    def _bonus(self, made: int) -> float:
        return (1 + PLAIN) ** (made == 0) * (1 + MARGIN) ** (made == self._preferred)

    def _wake(self, knowns: Sequence[DraftHistory], could_pay: bool) -> None:
        """Count a step of each attempt and each rest.

        Where a rest is over, those of others end too if at most a quarter of their `next_rest` is left.

        An attempt with drafts that are looked up lasts until some were found. Rests do not count on while no drafts
        could pay.
        """
        for known in knowns:
            if known.probe and (known.offered or not self.looks_up):
                known.probe -= 1
            known.offered = False
        if not could_pay:
            return
        resting = [known for known in knowns if known.rest]
        for known in resting:
            known.rest -= 1
        if any(not known.rest for known in resting):
            for known in resting:
                if 4 * known.rest <= known.next_rest:
                    known.rest, known.probe = 0, PROBE_STEPS + 1  # in the last one, no more drafts are begun
                    known.counts.fade(KEPT)
                    known.chances = self._chances(known, self._general(known.shared))

    def _could_pay(self, limits: tuple[int, ...], batch: int) -> bool:
        """Whether drafts would gain more than MARGIN if all were accepted. limits: the most drafts of each request."""
        key = limits, batch
        if key != self._last_asked:
            plain = batch / self.costs.curve(0, batch, self.most)[0]
            rates = []
            for most in self.costs.draft_lens[1:] or (1, self.most):
                drafts = sum([min(limit, most) for limit in limits])
                rates.append((batch + drafts) / self.costs.curve(self._graph(most), batch, self.most)[drafts])
            self._last_asked, self._last_answer = key, max(rates) > plain * (1 + MARGIN)
        return self._last_answer

    def _shortest_rest(self, batch: int) -> int:
        """Steps between two attempts, so that these take their share of the time.

        An attempt is a step in which all requests verify what a launch makes at least, or PROBE_DRAFTS.
        """
        made = 0 if self.looks_up else self.costs.draft_lens[1]
        drafts = min(PROBE_DRAFTS, self.most) if self.looks_up else made
        plain = self.costs.curve(0, batch, self.most)[0]
        attempt = self.costs.curve(made, batch, self.most)[batch * drafts]
        return int(PROBE_STEPS * (attempt / plain - 1) / ATTEMPTS)

    def _graph(self, most: int) -> int:
        """The least number of drafts that a launch can make, of those that are at least `most`, else the largest."""
        return next((made for made in self.costs.draft_lens if made >= most), self.costs.draft_lens[-1])

    def _verify(self, pairs: Sequence[tuple[DraftHistory, int]], batch: int) -> list[int]:
        tried = self.costs.tries(batch)
        if tried:
            return [0] * len(pairs)
        chances = [
            [] if known.rest else [*accumulate(known.expected, mul)] if known.expected else known.chances[:count]
            for known, count in pairs
        ]
        made = self._graph(max((self.made, *(count for _, count in pairs))))
        best, least = self._best(made, batch, chances)
        if made > self.made and batch / self.costs.curve(self.made, batch, self.most)[0] >= best:
            best, least = batch / self.costs.curve(self.made, batch, self.most)[0], 2.0  # a launch for them costs more
        tokens, rows = batch + sum(map(sum, chances)), sum(map(len, chances))
        if least <= 1 and tokens / self.costs.curve(made, batch, self.most)[rows] * (1 + MARGIN) >= best:
            least = 0.0  # all of them: a batch whose shapes do not change costs the host less
        for known, count in pairs:
            known.offered = known.offered or count > 0
        attempt = PROBE_DRAFTS if self.looks_up else self.most
        lengths = [
            min(count, attempt) if known.probe > 1 else sum([chance >= least for chance in one])
            for (known, count), one in zip(pairs, chances, strict=True)
        ]
        return lengths if tried is None or any(lengths) else [count for _, count in pairs]

    def _best(self, made: int, batch: int, chances: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Largest expected tokens per second, and the least chance of a draft that is verified then.

        chances: of the drafts that there are of each request. The likeliest are verified: within a request, no draft is
        likelier than one before it.
        """
        nodes = sorted(chain.from_iterable(chances), reverse=True)
        curve = self.costs.curve(made, batch, self.most)
        tokens = float(batch)
        best, least = tokens / curve[0], 2.0
        for chance, seconds in zip(nodes, curve[1:], strict=False):
            tokens += chance
            if tokens > best * seconds:
                best, least = tokens / seconds, chance
        return best, least

    def _best_of_levels(
        self, made: int, batch: int, levels: Sequence[Level], sums: Sequence[float]
    ) -> tuple[float, float]:
        """As `_best`, before the scores of the drafts are known. levels, sums: as levels_of gives them."""
        curve = self.costs.curve(made, batch, self.most)
        tokens, rows, last = float(batch), 0.0, len(curve) - 2
        most = tokens + sum(sums[:made])
        best, least = tokens / curve[0], 2.0
        for chance, count, position in levels:
            if position >= made:
                continue
            tokens += chance * count
            rows += count
            at = min(int(rows), last)
            more = curve[at + 1] - curve[at]
            seconds = curve[at] + more * (rows - at)
            if tokens > best * seconds:
                best = tokens / seconds
                least = min(chance, best * more)  # a draft with this chance costs what it earns
            elif most <= best * seconds:
                break  # more drafts take no less time
        return best, least

    def _expect(self, known: DraftHistory, scores: Sequence[float]) -> None:
        """Note the scores of the drafts of a request, and what to expect of these drafts."""
        ratio = known.hits / known.hits_expected
        known.scores = scores
        chances = [self._scores.chance(score) * ratio for score in scores]
        known.expected = [min(max(chance, 1 - HIGHEST), HIGHEST) for chance in chances]

    def _see_scores(self, known: DraftHistory, verified: int, accepted: int) -> None:
        """Learn from what was verified of drafts that had scores."""
        known.hits = (known.hits - RATIO_WEIGHT) * RATIO_DECAY + RATIO_WEIGHT
        known.hits_expected = (known.hits_expected - RATIO_WEIGHT) * RATIO_DECAY + RATIO_WEIGHT
        for j, score in enumerate(known.scores[: min(verified, accepted + 1)]):
            known.hits += j < accepted
            known.hits_expected += self._scores.chance(score)
            self._scores.observe(score, j < accepted)

    def _count(self, seen: Sequence[tuple[DraftHistory, int, int]]) -> None:
        """Count drafts that requests had: of each, how many were verified, and how many were accepted."""
        for known, verified, accepted in seen:
            known.counts.observe(verified, accepted, known.expected)
            known.shared.observe(verified, accepted, known.expected)
            known.expected, known.scores = (), ()
        general: dict[int, list[float]] = {}
        for known, *_ in seen:
            if id(known.shared) not in general:
                general[id(known.shared)] = self._general(known.shared)
            known.chances = self._chances(known, general[id(known.shared)])

    def _of(self, source: int) -> DraftHistory:
        known = self._requests.get(source)
        if known is None:
            known = self._requests[source] = DraftHistory(Counts(self.most, DECAY), self._shared[source < 0], [])
            known.chances = self._chances(known, self._general(known.shared))
        return known

    def _general(self, counts: Counts) -> list[float]:
        """Share of drafts that is expected to be accepted at each position if nothing else is known, [K]."""
        return counts.shares((FIRST_GUESS,) * self.most, WEIGHT)

    def _chances(self, known: DraftHistory, general: Sequence[float]) -> list[float]:
        """Chance that each draft is accepted with all before it, [K].

        What is expected at a position follows the request's own share at the position before. So where text has become
        predictable, drafts are soon expected to be accepted at positions that were not verified lately.
        """
        return [*accumulate(known.counts.shares(general, known.weight), mul)]

    def _record(self, call: str, asked: tuple[Any, ...], answer: object) -> None:
        if self.trace is not None:
            self.trace.append((call, asked, answer))
