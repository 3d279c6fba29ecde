"""The number of drafts of a step: what is expected of drafts, what pays, and how soon a change of the text is noticed.

`simulate` runs batches whose drafts are accepted by chance, on a clock of measured kinds of steps.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import pytest

from trtspec.engine import draft_length
from trtspec.engine.draft_chances import Offer, Outcome
from trtspec.engine.draft_history import LONGEST_REST
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.step_costs import Cell, StepCosts

K = 5
LENGTHS = (0, 1, 3, K)


def costs(row: Callable[[int], float], draft: Callable[[int], float]) -> StepCosts:
    """Steps of 8.3 ms and 1.5 ms for each further request. row, draft: ms of a verified row and of a drafting pass."""
    return StepCosts(
        [
            Cell(made, batch, verified, 8.3 + 1.5 * (batch - 1) + row(batch) * batch * verified + draft(batch) * made)
            for batch in (1, 2, 4, 8, 16, 32)
            for made in LENGTHS
            for verified in LENGTHS
            if verified <= made
        ]
    )


# about those of a model of 135 million parameters on two cores
REAL = costs(row=lambda batch: 0.85 if batch >= 8 else 0.6, draft=lambda batch: 0.35 + 0.05 * batch)
DEAR = costs(row=lambda batch: 1.5, draft=lambda batch: 10.0)  # drafts never pay


@dataclass
class Phase:
    """Steps in which the next draft of request i is accepted with chance(i)."""

    batch: int
    chance: Callable[[int], float]
    steps: int = 400
    tokens: int = 0
    time: float = 0.0
    made: Counter[int] = field(default_factory=Counter)
    verified: list[Counter[int]] = field(default_factory=list)  # by request

    @property
    def rate(self) -> float:
        return self.tokens / self.time


def simulate(
    chooser: DraftLength | int,
    phases: Sequence[Phase],
    times: StepCosts,
    seed: int = 0,
    clock: Callable[[int, float], float] | None = None,
) -> list[Phase]:
    """Run the phases one after the other.

    chooser: an int is a fixed number of drafts. clock: (number of the step, its time) -> what the chooser is told that
    it took; None = it is told nothing.
    """
    rng, number = random.Random(seed), 0
    for phase in phases:
        batch, ids = phase.batch, list(range(phase.batch))
        phase.verified = [Counter() for _ in ids]
        drafts = [0] * batch
        for _ in range(phase.steps):
            made = chooser if isinstance(chooser, int) else chooser.make([(i, K) for i in ids], batch)
            graph = min(length for length in LENGTHS if length >= max(made, *drafts))
            took = times.curve(graph, batch, K)[sum(drafts)]
            phase.time += took
            outcomes = []
            for i in ids:
                accepted = 0
                while accepted < drafts[i] and rng.random() < phase.chance(i):
                    accepted += 1
                outcomes.append(Outcome(i, drafts[i], accepted))
                phase.verified[i][drafts[i]] += 1
            phase.tokens += sum(outcome.accepted + 1 for outcome in outcomes)
            phase.made[made] += 1
            if isinstance(chooser, int):
                drafts = [made] * batch
            else:
                chooser.observe(outcomes)
                if clock is not None:
                    chooser.time(drafts, clock(number, took))
                drafts = chooser.verify([Offer(i, made) for i in ids], batch)
            number += 1
    return list(phases)


def phases() -> list[Phase]:
    def alternating(request: int) -> float:
        return 0.9 if request % 2 else 0.05

    fixed = [(1, 0.9), (1, 0.05), (1, 0.6), (1, 0.3), (8, 0.9), (8, 0.05), (8, 0.5), (32, 0.9), (32, 0.05), (1, 0.9)]
    made = [Phase(batch, lambda request, chance=chance: chance) for batch, chance in fixed]  # type: ignore[misc]
    return [*made, Phase(8, alternating)]


def simulate_scored(chooser: DraftLength | int, batch: int, *, knows: bool, steps: int = 1500) -> float:
    """Tokens per ms of drafts whose chances differ from step to step. knows: the scores of drafts are their chances."""
    rng, tokens, time, ids = random.Random(5), 0, 0.0, range(batch)
    drafts = [0] * batch
    chances: list[list[float]] = [[] for _ in ids]
    for _ in range(steps):
        made = chooser if isinstance(chooser, int) else chooser.make([(i, K) for i in ids], batch)
        graph = min(length for length in LENGTHS if length >= max(made, *drafts))
        time += REAL.curve(graph, batch, K)[sum(drafts)]
        accepted = [sum(accumulate((rng.random() < chance for chance in chances[i][: drafts[i]]), mul)) for i in ids]
        tokens += batch + sum(accepted)
        chances = [[rng.choice((0.1, 0.3, 0.9)) for _ in range(made)] for _ in ids]
        if isinstance(chooser, int):
            drafts = [made] * batch
        else:
            chooser.observe([Outcome(i, drafts[i], accepted[i]) for i in ids])
            drafts = chooser.verify([Offer(i, made, chances[i] if knows else ()) for i in ids], batch)
    return tokens / time


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.0), (8, 1.05)])
def test_scores_tell_which_drafts_to_verify(batch: int, gain: float) -> None:
    """Alone, a request may verify nearly all of its drafts."""
    blind, seeing = (simulate_scored(DraftLength(REAL, K), batch, knows=knows) for knows in (False, True))
    best = max(simulate_scored(length, batch, knows=False) for length in LENGTHS)
    assert seeing > gain * max(blind, best), (seeing / blind, seeing / best)


def test_drafts_that_are_not_verified_count_as_their_scores_say() -> None:
    """Else the likely drafts alone, which are verified, would be taken for the whole."""
    chooser = DraftLength(REAL, K)
    simulate_scored(chooser, 8, knows=True)
    mean = (0.1 + 0.3 + 0.9) / 3
    general = chooser._general(chooser._shared[False])
    assert general[0] == pytest.approx(mean, abs=0.12)  # 100 drafts count: a standard deviation of 0.035


def test_drafts_that_are_offered_twice_count_once() -> None:
    """The fast path asks, and where it is left the ordinary step asks again."""
    choosers = DraftLength(REAL, K), DraftLength(REAL, K)
    for times, chooser in enumerate(choosers, 1):
        for i in range(100):
            chooser.make([(0, K)], 1)
            offer = Offer(0, K, [0.2 + i % 7 / 10] * K)
            answers = [chooser.verify([offer], 1) for _ in range(times)]
            assert all(answer == answers[0] for answer in answers)
            chooser.observe([Outcome(0, *answers[0], 0)])
    once, twice = (chooser._of(0) for chooser in choosers)
    assert once.chances == twice.chances
    assert once.hits_expected == twice.hits_expected


@pytest.mark.parametrize("seed", range(3))
def test_each_phase_is_nearly_as_fast_as_with_the_best_fixed_number(seed: int) -> None:
    """The loss is what it takes to notice a change: text, batch size or both change from phase to phase."""
    chosen = simulate(DraftLength(REAL, K), phases(), REAL, seed)
    fixed = [simulate(length, phases(), REAL, seed + 100) for length in LENGTHS]
    for i, phase in enumerate(chosen):
        best = max(run[i].rate for run in fixed)
        assert phase.rate > 0.9 * best, (i, phase.rate / best, phase.made)
        assert phase.rate > 0.95 * fixed[0][i].rate, (i, phase.made)


@pytest.mark.parametrize("batch", [1, 8])
def test_answers_are_nearly_as_fast_as_with_the_best_fixed_number(batch: int) -> None:
    """Requests end after some steps, and new ones come. All of them are as easy, or as hard, to guess."""

    def rate(chooser: DraftLength | int, chance: float) -> float:
        runs = []
        for i in range(20):
            runs += simulate(chooser, [Phase(batch, lambda request: chance, steps=48)], REAL, seed=i)
            for request in range(batch) if isinstance(chooser, DraftLength) else ():
                chooser.forget(request)
        return sum(run.tokens for run in runs) / sum(run.time for run in runs)

    shares = {}
    for chance in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
        fixed = [rate(length, chance) for length in LENGTHS]
        chosen = rate(DraftLength(REAL, K), chance)
        shares[chance] = chosen / max(fixed)
        assert chosen > 0.98 * fixed[0], shares
    assert min(shares.values()) > 0.95, shares
    assert statistics.geometric_mean(shares.values()) > 0.98, shares


def test_requests_of_a_batch_get_the_numbers_that_suit_them() -> None:
    """Half of the requests are hard to guess: no fixed number of drafts is as fast for the batch."""
    mixed = phases()[-1:]
    (phase,) = simulate(DraftLength(REAL, K), mixed, REAL)
    assert phase.rate > 1.1 * max(simulate(length, phases()[-1:], REAL)[0].rate for length in LENGTHS)
    for request, lengths in enumerate(phase.verified):
        assert (lengths[0] < 100) == bool(request % 2), lengths


def test_drafts_that_can_never_pay_are_not_even_tried() -> None:
    chooser = DraftLength(DEAR, K)
    for phase in simulate(chooser, phases(), DEAR):
        assert phase.made == {0: phase.steps}


def test_attempts_are_rare_where_they_are_dear() -> None:
    """An attempt nearly doubles the time of a step. Requests of 48 steps then get by without any."""
    times = costs(row=lambda batch: 2.0, draft=lambda batch: 0.1)
    chooser = DraftLength(times, K)
    simulate(chooser, [Phase(8, lambda request: 0.0)], times)
    plain = chosen = 0.0
    for seed in range(10):
        for request in range(8):
            chooser.forget(request)
        (phase,) = simulate(chooser, [Phase(8, lambda request: 0.0, steps=48)], times, seed)
        chosen += phase.time
        plain += phase.steps * times.curve(0, 8, K)[0]
    assert chosen < 1.01 * plain


def test_drafts_that_begin_to_pay_are_found_within_the_longest_rest() -> None:
    chooser = DraftLength(REAL, K)
    simulate(chooser, [Phase(1, lambda request: 0.0, steps=1000)], REAL)
    (phase,) = simulate(chooser, [Phase(1, lambda request: 1.0)], REAL)
    assert phase.made[K] > phase.steps - LONGEST_REST - 20


def test_a_smaller_batch_is_noticed_at_once() -> None:
    """At a batch of 32 these drafts do not pay, though half of them are accepted. Nobody rests for that."""
    chooser = DraftLength(REAL, K)
    simulate(chooser, [Phase(1, lambda request: 0.6, steps=50)], REAL)
    dear = costs(row=lambda batch: 0.6 if batch == 1 else 3.0, draft=lambda batch: 0.4)
    chooser.costs = dear
    (large,) = simulate(chooser, [Phase(32, lambda request: 0.6, steps=50)], dear)
    (small,) = simulate(chooser, [Phase(1, lambda request: 0.6, steps=20)], dear)
    assert large.made == {0: 50}
    assert small.made[0] == 0


def test_a_recorded_trace_gives_the_same_decisions() -> None:
    first, second = DraftLength(REAL, K), DraftLength(StepCosts.from_json(REAL.to_json()), K)
    first.trace = []
    simulate(first, phases(), REAL)
    assert len({answer for call, _, answer in first.trace if call == "make"}) == len(LENGTHS)
    for call, asked, answer in first.trace:
        assert getattr(second, call)(*asked) == answer


def test_limits_are_kept() -> None:
    chooser = DraftLength(REAL, K)
    assert chooser.make([(1, 1), (2, 0)], 2) <= 1
    assert chooser.make([(1, 0), (2, 0)], 2) == 0
    assert chooser.make([], 2) == 0  # nobody speculates
    assert all(0 <= length <= 2 for length in chooser.verify([Offer(1, 2), Offer(2, 0)], 2))


def test_only_drafts_that_requests_take_count() -> None:
    """Requests that verify one draft get one, though a fixed number of 5 would be best without that limit."""
    chooser, free = DraftLength(REAL, K), DraftLength(REAL, K)
    for _ in range(50):
        chooser.observe([Outcome(0, 1, 1)])
        free.observe([Outcome(0, K, K)])
        last = chooser.make([(0, 1)], 1), free.make([(0, K)], 1)
    assert last == (1, K)


def test_an_attempt_lasts_a_step() -> None:
    """Drafts are made in one launch and verified in the next one, whether they are offered or not."""
    for offered in (True, False):
        chooser = DraftLength(REAL, K)
        for _ in range(60):
            chooser.observe([Outcome(0, K, 0)])
        steps, drafts = [], 0
        for _ in range(40):
            made = chooser.make([(0, K)], 1)
            steps.append((made, drafts))
            chooser.observe([Outcome(0, drafts, 0)])
            (drafts,) = chooser.verify([Offer(0, made if offered else 0)], 1)
        tried = [step for step in steps if any(step)]
        assert tried == ([(1, 0), (0, 1)] if offered else [(1, 0)])


def test_a_rest_ends_where_drafts_pay_in_a_smaller_batch() -> None:
    """Where they do not pay in the smaller batch either, the rest goes on as it was."""
    for accepted, rests in ((1, False), (0, True)):
        chooser = DraftLength(costs(row=lambda batch: 0.1 * batch, draft=lambda batch: 0.1), K)
        ids = range(16)
        for _ in range(30):
            chooser.observe([Outcome(i, 1, 0) for i in ids[:8]] + [Outcome(i, 1, accepted) for i in ids[8:]])
        while not chooser._of(15).rest:
            chooser.observe([Outcome(15, 2, 0)])
            chooser.make([(i, K) for i in ids], 16)
        left, length = chooser._of(15).rest, chooser._of(15).next_rest
        chooser._of(15).chances = [0.3 * accepted] * K
        chooser.make([(15, K)], 1)
        assert (chooser._of(15).rest > 0) == rests
        if rests:
            assert (chooser._of(15).rest, chooser._of(15).next_rest) == (left - 1, length)


def test_drafts_of_grammars_are_counted_apart_and_tried_again() -> None:
    """Drafts that a request's grammar forces say nothing of its drafter. If they fail, they are tried now and then."""
    times = costs(lambda rows: 1 + 0.4 * rows, lambda made: 0.1 * made)
    chooser = DraftLength(times, 5)
    before = chooser.verify([Offer(1, 3)], 1)
    for _ in range(20):
        chooser.observe([Outcome(~1, 3, 0)])
    assert chooser.verify([Offer(1, 3)], 1) == before != [0]
    tried = []
    for _ in range(180):
        chooser.make([(1, 3)], 1)
        tried.append(chooser.verify([Offer(~1, 3)], 1))
    assert [nth for nth, lengths in enumerate(tried, 1) if lengths == [3]] == [16, 48, 112, 176]
    assert tried.count([0]) == 176
    assert chooser.verify([Offer(~2, 3)], 1) == [0], "those of other requests are expected to do as badly"
    for _ in range(20):
        chooser.observe([Outcome(~1, 3, 3)])
    assert chooser.verify([Offer(~1, 3)], 1) == [3]
    chooser.forget(1)
    assert not chooser._requests.keys() & {1, ~1}


def test_drafts_of_others_must_pay_for_the_launch_that_verifies_them() -> None:
    """A launch that makes no drafts is cheaper than one that verifies some, even if the rows cost nothing."""
    times = costs(row=lambda batch: 0.001, draft=lambda batch: 2.0)
    chooser = DraftLength(times, 5)
    for _ in range(20):
        chooser.observe([Outcome(1, 3, 0), Outcome(~1, 3, 0), Outcome(~1, 3, 0), Outcome(~1, 3, 1)])
    assert chooser.make([(1, 3)], 1) == 0
    share = chooser._of(~1).chances[0]
    assert 0.2 < share < 0.4
    assert chooser.verify([Offer(~1, 3)], 1) == [0]
    for _ in range(20):
        chooser.observe([Outcome(~1, 3, 3)])
    assert chooser.verify([Offer(~1, 3)], 1) == [3]


def test_a_single_rejection_is_no_run() -> None:
    chooser = DraftLength(REAL, K)
    for _ in range(200):
        chooser.observe([Outcome(0, K, K)])
    sure = chooser._of(0).chances[0]
    chooser.observe([Outcome(0, K, 0)])
    assert sure > 0.99
    assert chooser._of(0).chances[0] > 0.9


def test_what_is_expected_of_a_request() -> None:
    """A request that is new is expected to do as the others; its own drafts count more with every step."""
    chooser = DraftLength(REAL, K)
    new = chooser._of(0).chances
    assert new == pytest.approx([draft_length.FIRST_GUESS**n for n in range(1, K + 1)])
    for _ in range(200):
        chooser.observe([Outcome(1, K, 1)])
    assert chooser._of(1).chances[:2] == pytest.approx([1.0, 0.0], abs=0.1)
    assert chooser._of(2).chances[:2] == pytest.approx([1.0, 0.0], abs=0.1)
    for _ in range(3):
        chooser.observe([Outcome(2, K, 0)])
    assert chooser._of(2).chances[0] < 0.7
    for _ in range(5):
        chooser.observe([Outcome(2, K, 0)])
    assert chooser._of(2).chances[0] < 0.4
    chooser.forget(2)
    assert chooser._of(2).chances[0] > 0.8
