"""The scheduler under thousands of random loads: all requests finish, limits hold, the oldest is never preempted.

The host imitates a step of the engine: it commits each scheduled row with a random verdict. Requests that still run get
a random proposal. No model is needed to find a livelock.
"""

from __future__ import annotations

import random

import pytest

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.kv import rewind
from trtspec.kv.blocks import BlockAllocator
from trtspec.kv.reuse import PrefixReuse
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def make_request(request_id: int, prompt_len: int, max_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        tokens=[1] * prompt_len,
        prompt_len=prompt_len,
        sampling=GREEDY,
        length_limit=prompt_len + max_tokens,
        min_tokens=0,
        eos_ids=frozenset({2}),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
    )


class Load:
    """A random engine configuration and random requests, some with samples. Each request fits alone."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.K = rng.choice((0, 1, 3, 5, 9))
        block_size, num_blocks = rng.choice((1, 2, 4, 16)), rng.randint(4, 24)
        batch = rng.randint(1, 6)
        self.allocator = BlockAllocator(num_blocks, block_size)
        rows = batch * (self.K + 1) + rng.choice((0, 1, 10))
        self.scheduler = Scheduler(self.allocator, batch, rows, self.K)
        self.stop_chance, self.abort_chance = rng.choice((0.0, 0.1, 0.6)), rng.choice((0.0, 0.05, 0.3))
        self.groups = []
        request_id = 0
        for _ in range(rng.randint(1, 10)):
            length = rng.randint(2, self.allocator.capacity)
            max_tokens = rng.randint(1, length - 1)
            group = [
                make_request(request_id + i, length - max_tokens, max_tokens) for i in range(rng.choice((1, 1, 3)))
            ]
            request_id += len(group)
            self.groups.append(group)
        self.requests = [request for group in self.groups for request in group]

    def arrive(self) -> None:
        """Perhaps submit one more prompt."""
        if self.groups and self.rng.random() < 0.5:
            leader, *siblings = self.groups.pop(0)
            self.scheduler.add(leader, siblings)

    def abort(self) -> None:
        """Perhaps abort a request: a running one, a waiting one, or a sample that waits for its leader."""
        queued = [sibling for siblings in self.scheduler.siblings.values() for sibling in siblings]
        alive = [*self.scheduler.running, *self.scheduler.waiting, *queued]
        if alive and self.rng.random() < self.abort_chance:
            request = self.rng.choice(alive)
            request.abort()
            if not self.scheduler.drop_sibling(request):
                self.scheduler.remove(request)

    def finish_step(self, batch: Batch) -> None:
        """Do what StepLoop and Proposer do with a verdict, with random numbers in place of models."""
        emitted = []
        for row in batch:
            request, count = row.request, self.rng.randint(1, row.draft_len + 1) if row.emits else 0
            tokens = [2 if self.rng.random() < self.stop_chance else 1 for _ in range(count)]
            rewind.commit(request.kv, row.num_rows, count, row.draft_len)
            request.drafts = []
            request.append(tokens)
            if count and row.is_context:
                self.scheduler.release_siblings(request)
            if request.finished:
                self.scheduler.remove(request)
            elif count:
                emitted.append(request)
        for request in emitted:
            reserved = len(request.kv.blocks) * self.allocator.block_size
            length = len(request.tokens)
            most = min(self.K, request.length_limit - length - 1, reserved - length + 1)
            request.drafts = [1] * self.rng.randint(0, max(most, 0))

    def check(self, batch: Batch) -> None:
        """Check the limits of a step."""
        assert len(self.scheduler.running) <= self.scheduler.max_batch_size
        assert sum(row.num_rows for row in batch) <= self.scheduler.max_num_tokens
        for row in batch:
            assert row.num_rows >= 1
            assert row.draft_len <= self.K
            assert row.end <= len(row.request.kv.blocks) * self.allocator.block_size
        self.allocator.check(self.scheduler.live())


@pytest.mark.parametrize("block_of_seeds", range(4))
def test_every_load_runs_to_its_end(block_of_seeds: int) -> None:
    """Every step with requests makes progress, limits hold, and all blocks are free at the end."""
    for seed in range(block_of_seeds * 200, block_of_seeds * 200 + 200):
        load = Load(seed)
        while load.groups or load.scheduler.has_work:
            load.arrive()
            load.abort()
            if not load.scheduler.has_work:
                continue
            batch = load.scheduler.schedule()
            assert batch, f"seed {seed}: requests wait, but nothing is scheduled"
            load.check(batch)
            load.finish_step(batch)
        assert all(request.finished for request in load.requests)
        assert load.allocator.num_free == load.allocator.num_blocks - 1


def test_the_oldest_is_never_preempted() -> None:
    """The first request in line gets rows in every step until it ends."""
    for seed in range(300):
        load = Load(seed)
        while load.groups or load.scheduler.has_work:
            load.arrive()
            oldest = load.scheduler.running[0] if load.scheduler.running else None
            batch = load.scheduler.schedule()
            assert oldest is None or oldest in [row.request for row in batch], f"seed {seed}"
            load.finish_step(batch)


def test_contexts_come_before_generations() -> None:
    scheduler = Scheduler(BlockAllocator(20, 4), 4, 32, 3)
    first = make_request(0, 5, 5)
    scheduler.add(first, [])
    (row,) = scheduler.schedule()
    rewind.commit(first.kv, row.num_rows, 1, 0)
    first.append([1])
    scheduler.add(make_request(1, 5, 5), [])
    assert [row.is_context for row in scheduler.schedule()] == [True, False]


def test_a_chunk_that_is_not_the_last_does_not_emit() -> None:
    scheduler = Scheduler(BlockAllocator(20, 4), 1, 4, 3)
    scheduler.add(make_request(0, 6, 2), [])
    (row,) = scheduler.schedule()
    assert (row.num_rows, row.emits) == (4, False)


def test_short_of_blocks_a_request_first_loses_its_drafts() -> None:
    """Preemption would cost the prefill of a whole prompt. A lost draft costs nothing."""
    scheduler = Scheduler(BlockAllocator(3, 4), 2, 16, num_draft_tokens=3)  # one block each
    old, new = make_request(0, 3, 5), make_request(1, 3, 1)
    old.length_limit = 4  # so that at first it needs no more
    for request in (old, new):
        scheduler.add(request, [])
    for row in scheduler.schedule():
        rewind.commit(row.request.kv, row.num_rows, 1, 0)
        row.request.tokens.append(1)
    old.length_limit, old.drafts = 8, [1, 1]
    new.length_limit = 5
    batch = scheduler.schedule()
    assert (batch[0].request, batch[0].draft_len) == (old, 0)


def test_nobody_waits_for_the_blocks_of_samples_that_came_later() -> None:
    """Samples of two prompts hold shared blocks in the queue while no request runs. The first in line may take them."""
    scheduler = Scheduler(BlockAllocator(6, 4), 4, 64, num_draft_tokens=3)  # 20 tokens
    later, ahead = make_request(1, 13, 4), make_request(2, 13, 7)
    for request in (later, ahead):
        scheduler.add(request, [])
    scheduler.allocator.reserve(later.kv, 12)
    later.kv.committed = 12
    scheduler.waiting.rotate(1)
    assert [row.request for row in scheduler.schedule()] == [ahead]


# -- prefix reuse --------------------------------------------------------------------------------------------------


def reusing(num_blocks: int, max_num_tokens: int = 64) -> Scheduler:
    """A scheduler with prefix reuse, blocks of 4 tokens and no drafts."""
    allocator = BlockAllocator(num_blocks, 4)
    return Scheduler(allocator, 4, max_num_tokens, num_draft_tokens=0, reuse=PrefixReuse(allocator))


def run_step(scheduler: Scheduler) -> Batch:
    """Run a step in which every scheduled row that emits gets a 1."""
    batch = scheduler.schedule()
    for row in batch:
        emits = row.emits
        rewind.commit(row.request.kv, row.num_rows, emits, 0)
        row.request.append([1] * emits)
        if emits:
            scheduler.release_siblings(row.request)
        if row.request.finished:
            scheduler.remove(row.request)
    scheduler.allocator.check(scheduler.live())
    return batch


def run_alone(scheduler: Scheduler, request: Request) -> int:
    """Run a request to its end, and return the number of rows computed."""
    scheduler.add(request, [])
    rows = 0
    while not request.finished:
        rows += sum(row.num_rows for row in run_step(scheduler))
    return rows


def counted(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens


@pytest.mark.parametrize(
    ("num_blocks", "limit", "held"),
    [
        (42, 100, 5),  # plenty: three more than the two it needs
        (42, 11, 3),  # never more than it can fill
        (33, 100, 2),  # no more while others may need them
    ],
)
def test_blocks_come_a_few_at_a_time_while_there_are_plenty(num_blocks: int, limit: int, held: int) -> None:
    allocator = BlockAllocator(num_blocks, 4)
    scheduler = Scheduler(allocator, 4, 64, num_draft_tokens=0)
    one = make_request(0, 5, limit - 5)
    assert scheduler.reserve(one, 5)
    assert len(one.kv.blocks) == held


def test_what_is_needed_is_given_even_if_no_more_is_left() -> None:
    scheduler = Scheduler(BlockAllocator(43, 4), 4, 200, num_draft_tokens=0)  # 42 blocks
    one = make_request(0, 160, 840)
    assert scheduler.reserve(one, 160)
    assert len(one.kv.blocks) == 40


def test_rows_of_an_earlier_request_are_not_computed_again() -> None:
    scheduler = reusing(20)
    assert run_alone(scheduler, make_request(0, 10, 3)) == 12  # the KV of the last token is not needed
    assert run_alone(scheduler, make_request(1, 10, 3)) == 4
    assert counted(scheduler) == (20, 8)


def test_rows_of_the_step_in_which_a_request_ends_are_found() -> None:
    scheduler = reusing(20)
    assert run_alone(scheduler, make_request(0, 9, 1)) == 9
    assert run_alone(scheduler, make_request(1, 9, 1)) == 1


def test_output_is_found_as_well_as_the_prompt() -> None:
    scheduler = reusing(20)
    run_alone(scheduler, make_request(0, 10, 8))  # 17 rows
    assert run_alone(scheduler, make_request(1, 20, 1)) == 4


def test_rows_are_found_while_their_request_still_runs() -> None:
    scheduler = reusing(20)
    scheduler.add(make_request(0, 10, 9), [])
    run_step(scheduler)
    scheduler.add(make_request(1, 10, 9), [])
    assert [row.num_rows for row in run_step(scheduler)] == [2, 1]


def test_a_request_may_have_all_its_rows_computed() -> None:
    scheduler = reusing(20)
    run_alone(scheduler, make_request(0, 10, 3))
    request = make_request(1, 10, 3)
    request.reuses_prefix = False
    assert run_alone(scheduler, request) == 12
    assert counted(scheduler) == (10, 0)


def test_a_request_finds_its_own_rows_after_a_preemption() -> None:
    scheduler = reusing(8)  # 28 tokens
    old, new = make_request(0, 8, 8), make_request(1, 8, 8)
    new.tokens[:] = [3] * 8
    for request in (old, new):
        scheduler.add(request, [])
    while not scheduler.num_preemptions:
        run_step(scheduler)
    while not old.finished:
        run_step(scheduler)
    before = len(new.tokens)
    (row,) = run_step(scheduler)
    assert (row.request, row.is_context) == (new, True)
    assert row.num_rows < before
    assert counted(scheduler)[1] > 0


def test_a_preempted_request_publishes_what_it_gives_up() -> None:
    """A preempted request then needs one row only, and runs as a context: its drafts were dropped with its blocks."""
    scheduler = reusing(20)
    request = make_request(0, 8, 8)
    scheduler.add(request, [])
    (row,) = scheduler.schedule()
    rewind.commit(request.kv, row.num_rows, 1, 0)
    request.append([1])
    scheduler._preempt(request)
    (row,) = run_step(scheduler)
    assert (row.num_rows, row.is_context, row.emits) == (1, True, True)


def test_blocks_that_were_found_are_given_back_if_the_rest_does_not_fit() -> None:
    scheduler = reusing(8)
    run_alone(scheduler, make_request(0, 9, 1))  # two blocks that can be found
    running = make_request(1, 13, 7)
    running.tokens[:] = [3] * 13
    scheduler.add(running, [])
    run_step(scheduler)
    late = make_request(2, 17, 3)
    scheduler.add(late, [])
    run_step(scheduler)
    assert (late.kv.blocks, late.kv.committed, counted(scheduler)) == ([], 0, (22, 0))
    while not running.finished:
        run_step(scheduler)
    (row,) = run_step(scheduler)
    assert row.request is late


def test_siblings_that_lost_their_blocks_find_them_again() -> None:
    scheduler = reusing(20)
    leader, *siblings = (make_request(i, 10, 3) for i in range(3))
    scheduler.add(leader, siblings)
    run_step(scheduler)
    while scheduler._drop_waiting_blocks():
        pass
    assert [row.num_rows for row in run_step(scheduler)] == [2, 2, 1]
