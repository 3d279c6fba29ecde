"""Prefix reuse in any order of events: what a sequence reads from the cache was computed from its own tokens.

The engine runs without models. A shadow of the cache remembers, for every row of target and draft KV, the tokens that
the row was computed from. After every event, these tokens are compared with those of each sequence.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Scheduled, Scheduler
from trtspec.kv import rewind
from trtspec.kv.blocks import BlockAllocator, SequenceKV
from trtspec.kv.reuse import PrefixReuse
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
STOP = 2
MOTIFS = [[3] * 60, [3, 4] * 30, [3] * 20 + [5] * 40]  # prompts begin like one of them, so many begin alike

# Draft KV that a mode keeps: none (n-gram), that of a draft model, or that of layers that read the token after their
# own. Those run inside the target's launch or after it. A head after it cannot compute rows that were taken over.
NONE, DRAFT_MODEL, SHIFTED, HEAD = MODES = ("none", "draft model", "shifted", "head")

Rows = dict[tuple[int, int], int]
"""(block, offset) -> the tokens that the row was computed from: a hash of them all, or a random number for junk."""


def prefixes(tokens: Sequence[int]) -> list[int]:
    """Hashes of the tokens: entry p stands for tokens 0..p."""
    hashes, last = [], 0
    for token in tokens:
        last = hash((last, token))
        hashes.append(last)
    return hashes


class World:
    """A scheduler, its requests, and the content of the cache. Events are methods; `rng` makes the verdicts."""

    def __init__(self, mode: str, block_size: int, num_blocks: int, batch: int, K: int, rng: random.Random) -> None:
        self.mode, self.K, self.rng = mode, K, rng
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.shifted = mode in (SHIFTED, HEAD)
        reuse = PrefixReuse(self.allocator, keeps_draft_kv=mode != NONE, shifted=self.shifted)
        room = batch * (K + 1) + rng.choice((0, 7))
        self.scheduler = Scheduler(self.allocator, batch, room, K, reuse, forks_draft_kv=mode == HEAD)
        self.scheduler.wants_draft_kv = lambda request: mode == SHIFTED or (mode == HEAD and request.speculates)
        self.target: Rows = {}
        self.draft: Rows = {}
        self.requests: list[Request] = []
        self.ending: set[Request] = set()  # their next token is a stop
        self.findable: set[bytes] = set()
        self.seen: Counter[str] = Counter()

    # -- events ----------------------------------------------------------------------------------------------------

    def submit(self, motif: int, same: int, other: int, num_samples: int, reuses_prefix: bool) -> None:
        """Submit a prompt of `same` tokens of a motif and up to `other` more, cut to what fits."""
        prompt = MOTIFS[motif][:same] + [self.rng.randrange(3, 6) for _ in range(other)]
        prompt = prompt[: self.allocator.capacity - 1]
        limit = self.rng.randint(len(prompt) + 1, min(self.allocator.capacity, len(prompt) + 25))
        samples = [
            Request(
                request_id=len(self.requests) + i,
                tokens=list(prompt),
                prompt_len=len(prompt),
                sampling=GREEDY,
                length_limit=limit,
                min_tokens=0,
                eos_ids=frozenset({STOP}),
                stop_token_ids=frozenset(),
                include_stop=False,
                text=None,
                speculates=self.mode != HEAD or self.rng.random() < 0.5,
                reuses_prefix=reuses_prefix,
            )
            for i in range(num_samples)
        ]
        self.requests += samples
        self.scheduler.add(samples[0], samples[1:])

    def step(self) -> None:
        """Run a step as StepLoop and Proposer do, with random verdicts and drafts."""
        before = self.scheduler.prefix_hit_tokens
        batch = self.scheduler.schedule()
        assert batch, "requests wait, but nothing is scheduled"
        self.seen["hits"] += self.scheduler.prefix_hit_tokens > before
        known = [row.request.tokens + row.request.drafts[: row.draft_len] for row in batch]
        for row, tokens in zip(batch, known, strict=True):
            kv = row.request.kv
            self._write(self.target, kv, prefixes(tokens), kv.committed, row.end)
        for row, tokens in zip(batch, known, strict=True):
            self._assert_reads(self.target, row.request.kv, prefixes(tokens), row.end)
        emitted = [row.request for row in batch if self._update(row)]
        if self.mode != SHIFTED:
            for request in emitted:
                self._propose(request)
        for request in emitted:
            self.scheduler.release_siblings(request)

    def abort(self, request: Request) -> None:
        request.abort()
        if not self.scheduler.drop_sibling(request):
            self.scheduler.remove(request)

    def finish(self, request: Request) -> None:
        """Make the request's next step its last."""
        self.ending.add(request)

    def preempt(self) -> None:
        """Preempt the last running request, as if an older one needed the room."""
        self.scheduler._preempt(self.scheduler.running[-1])

    def drain(self) -> None:
        """Run all requests to their end. Then every block is free."""
        while self.scheduler.has_work:
            self.step()
            self.check()
        assert not self.alive
        assert self.allocator.num_free == self.allocator.num_blocks - 1

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.finished]

    # -- one step --------------------------------------------------------------------------------------------------

    def _update(self, row: Scheduled) -> bool:
        """Apply a random verdict to one request. Returns whether the request goes on and wants drafts."""
        request, kv = row.request, row.request.kv
        count = self.rng.randint(1, row.draft_len + 1) if row.emits else 0
        tokens = [*request.drafts[: count - 1], self.rng.randrange(3, 6)] if count else []
        if tokens and (request in self.ending or self.rng.random() < 0.05):
            tokens[self.rng.randrange(count)] = STOP  # perhaps not the last: what follows is committed all the same
        start = kv.committed
        rewind.commit(kv, row.num_rows, count, row.draft_len, draft_layers=self.mode == SHIFTED)
        if self.mode == SHIFTED:  # the draft layers run inside the launch, on its rows
            self._write_draft(kv, request.tokens + tokens, start, kv.committed)
            most = self._room(request, len(request.tokens) + count) if count else 0
            request.drafts = [self.rng.randrange(3, 6) for _ in range(self.rng.randint(0, most))]
            self._write_junk(kv, len(request.drafts) - 1)
        else:
            request.drafts = []
        request.append(tokens)
        if count and row.is_context and self.mode != HEAD:
            self.scheduler.release_siblings(request)
        if request.finished:
            self.scheduler.remove(request)
        return count > 0 and not request.finished

    def _propose(self, request: Request) -> None:
        """Propose random drafts as a drafter would: draft KV of all tokens, then of every draft but the last."""
        length = len(request.tokens)
        if self.mode == HEAD and (not request.speculates or self.rng.random() < 0.3):
            return
        request.drafts = [self.rng.randrange(3, 6) for _ in range(self.rng.randint(0, self._room(request, length)))]
        if self.mode == DRAFT_MODEL and request.drafts:
            start, request.kv.draft_kv_len = request.kv.draft_kv_len, length + len(request.drafts) - 1
            self._write_draft(request.kv, request.tokens + request.drafts, start, request.kv.draft_kv_len)
        elif self.mode == HEAD:
            start, request.kv.draft_kv_len = request.kv.draft_kv_len, length - 1
            self._write_draft(request.kv, request.tokens, start, length - 1)
            self._write_junk(request.kv, len(request.drafts) - 1)

    def _room(self, request: Request, length: int) -> int:
        """Number of drafts that fit after `length` tokens, as in Proposer."""
        reserved = len(request.kv.blocks) * self.allocator.block_size
        return max(min(self.K, request.length_limit - length - 1, reserved - length + 1), 0)

    # -- the cache -------------------------------------------------------------------------------------------------

    def _write_draft(self, kv: SequenceKV, tokens: Sequence[int], start: int, end: int) -> None:
        """Write draft KV of rows start..end-1. Computing them reads all rows before them."""
        hashes = prefixes(tokens)[self.shifted :]
        self._write(self.draft, kv, hashes, start, end)
        self._assert_reads(self.draft, kv, hashes, end)

    def _write_junk(self, kv: SequenceKV, count: int) -> None:
        """Write rows of drafts, from hidden states that no other sequence has."""
        for position in range(kv.committed, kv.committed + count):
            self.draft[self._slot(kv, position)] = self.rng.getrandbits(64)

    def _slot(self, kv: SequenceKV, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.allocator.block_size)
        return kv.blocks[block], offset

    def _write(self, rows: Rows, kv: SequenceKV, hashes: Sequence[int], start: int, end: int) -> None:
        for position in range(start, end):
            rows[self._slot(kv, position)] = hashes[position]

    def _assert_reads(self, rows: Rows, kv: SequenceKV, hashes: Sequence[int], end: int) -> None:
        for position in range(end):
            assert rows[self._slot(kv, position)] == hashes[position], f"row {position} of {kv} is another text's"

    def check(self) -> None:
        """Check that no block leaks, and that every row that counts as computed is right.

        Rows in blocks that are held are checked here, and rows in other blocks once they are found.
        """
        self.allocator.check(self.scheduler.live())
        self.seen["evictions"] += len(self.findable - set(self.allocator._published))
        self.findable = set(self.allocator._published)
        held = {block for kv in self.scheduler.live() for block in kv.blocks}
        assert self.allocator.num_free + len(held) == self.allocator.num_blocks - 1
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            kv, hashes = request.kv, prefixes(request.tokens)
            self._assert_reads(self.target, kv, hashes, kv.committed)
            if self.mode != NONE:
                self._assert_reads(self.draft, kv, hashes[self.shifted :], min(kv.draft_kv_len, kv.committed))


WORLDS = {"block_size": (1, 2, 3, 4), "num_blocks": (6, 12, 25, 60), "batch": (1, 3, 6), "K": (0, 1, 3)}
MOST_ALIVE = 8


def random_event(world: World, rng: random.Random) -> None:
    """Run one random event of those that can happen. Steps are more frequent."""
    events = ["step"] * 8 + ["submit"] * 4 + ["abort", "finish", "preempt"]
    event = rng.choice(events)
    if event == "submit" and len(world.alive) < MOST_ALIVE:
        world.submit(rng.randrange(3), rng.randint(1, 30), rng.randint(0, 6), rng.choice((1, 1, 3)), rng.random() < 0.9)
    elif event == "step" and world.scheduler.has_work:
        world.step()
    elif event == "abort" and world.alive:
        world.abort(rng.choice(world.alive))
    elif event == "finish" and world.alive:
        world.finish(rng.choice(world.alive))
    elif event == "preempt" and world.scheduler.running:
        world.preempt()
    else:
        return
    world.seen["events"] += 1


@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_random_events(mode: str) -> None:
    """The cache stays right in small and large caches, with frequent hits, evictions and preemptions."""
    seen: Counter[str] = Counter()
    seed = 0
    while seen["events"] < 4_000:
        rng = random.Random(seed)
        world = World(mode, **{name: rng.choice(values) for name, values in WORLDS.items()}, rng=rng)
        while world.seen["events"] < 150:
            random_event(world, rng)
            world.check()
        world.drain()
        seen += world.seen
        seen["preemptions"] += world.scheduler.num_preemptions
        seed += 1
    assert min(seen["hits"], seen["evictions"], seen["preemptions"]) > 160, seen


class ReuseMachine(RuleBasedStateMachine):
    """A state machine of the same events in any order that hypothesis finds, shrunk to the shortest that fails."""

    @initialize(
        mode=st.sampled_from(MODES), seed=st.integers(0, 99), **{k: st.sampled_from(v) for k, v in WORLDS.items()}
    )
    def start(self, mode: str, seed: int, block_size: int, num_blocks: int, batch: int, K: int) -> None:
        self.world = World(mode, block_size, num_blocks, batch, K, random.Random(seed))

    @precondition(lambda self: len(self.world.alive) < MOST_ALIVE)
    @rule(
        motif=st.integers(0, len(MOTIFS) - 1),
        same=st.integers(1, 30),
        other=st.integers(0, 6),
        num_samples=st.integers(1, 3),
        reuses_prefix=st.booleans(),
    )
    def submit(self, motif: int, same: int, other: int, num_samples: int, reuses_prefix: bool) -> None:
        self.world.submit(motif, same, other, num_samples, reuses_prefix)

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.world.scheduler.has_work:
                self.world.step()
                self.world.check()

    @precondition(lambda self: self.world.alive)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.world.abort(self.world.alive[which % len(self.world.alive)])

    @precondition(lambda self: self.world.alive)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        self.world.finish(self.world.alive[which % len(self.world.alive)])

    @precondition(lambda self: self.world.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.world.preempt()

    @invariant()
    def the_cache_is_right(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestReuse = ReuseMachine.TestCase
TestReuse.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
