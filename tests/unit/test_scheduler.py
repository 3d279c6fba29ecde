"""The scheduler against thousands of random loads: everybody finishes, limits hold, the oldest is never preempted.

A step of the engine is imitated on the host: each scheduled row is committed with a random verdict, and who still runs
gets a random proposal. No model is needed to find a livelock.
"""

from __future__ import annotations

import random

import pytest

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.kv import rewind
from trtspec.kv.blocks import BlockAllocator
from trtspec.sampling_params import ResolvedSampling

GREEDY = ResolvedSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


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
    """A random engine configuration and random requests, some with samples, all of which fit alone."""

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
        """Perhaps one more prompt."""
        if self.groups and self.rng.random() < 0.5:
            leader, *siblings = self.groups.pop(0)
            self.scheduler.add(leader, siblings)

    def abort(self) -> None:
        """Perhaps somebody is aborted: running, waiting, or a sample that waits for its leader."""
        queued = [sibling for siblings in self.scheduler.siblings.values() for sibling in siblings]
        alive = [*self.scheduler.running, *self.scheduler.waiting, *queued]
        if alive and self.rng.random() < self.abort_chance:
            request = self.rng.choice(alive)
            request.abort()
            if not self.scheduler.drop_sibling(request):
                self.scheduler.remove(request)

    def finish_step(self, batch: Batch) -> None:
        """What StepLoop and Proposer do with a verdict, with random numbers in place of models."""
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
        """Limits of a step."""
        assert len(self.scheduler.running) <= self.scheduler.max_batch_size
        assert sum(row.num_rows for row in batch) <= self.scheduler.max_num_tokens
        for row in batch:
            assert row.num_rows >= 1
            assert row.draft_len <= self.K
            assert row.end <= len(row.request.kv.blocks) * self.allocator.block_size
        self.allocator.check(self.scheduler.live())


@pytest.mark.parametrize("block_of_seeds", range(4))
def test_every_load_runs_to_its_end(block_of_seeds: int) -> None:
    """Progress in every step in which somebody is there, limits kept, all blocks back at the end."""
    for seed in range(block_of_seeds * 500, block_of_seeds * 500 + 500):
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
    """Whoever is first in line gets rows in every step until it ends."""
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
    """Preemption would cost a whole prompt, a draft costs nothing."""
    scheduler = Scheduler(BlockAllocator(3, 4), 2, 16, num_draft_tokens=3)  # one block each
    old, new = make_request(0, 3, 5), make_request(1, 3, 1)
    old.length_limit = 4  # so that it asks for no more at first
    for request in (old, new):
        scheduler.add(request, [])
    for row in scheduler.schedule():
        rewind.commit(row.request.kv, row.num_rows, 1, 0)
        row.request.tokens.append(1)
    old.length_limit, old.drafts = 8, [1, 1]
    new.length_limit = 5
    batch = scheduler.schedule()
    assert (batch[0].request, batch[0].draft_len) == (old, 0)


def test_nobody_waits_for_the_blocks_of_samples_that_wait_behind() -> None:
    """Two prompts' samples hold shared blocks in the queue while nobody runs: the first in line may take them."""
    scheduler = Scheduler(BlockAllocator(6, 4), 4, 64, num_draft_tokens=3)  # 20 tokens
    behind, ahead = make_request(1, 13, 4), make_request(2, 13, 7)
    for request in (behind, ahead):
        scheduler.add(request, [])
    scheduler.allocator.reserve(behind.kv, 12)
    behind.kv.committed = 12
    scheduler.waiting.rotate(1)
    assert [row.request for row in scheduler.schedule()] == [ahead]
