"""The block allocator against a model of it, and the KV that a commit keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trtspec.kv import rewind
from trtspec.kv.blocks import BlockAllocator, SequenceKV

NUM_BLOCKS = 12
BLOCK_SIZE = 4


class AllocatorMachine(RuleBasedStateMachine):
    """A state machine that runs reserve, commit, fork, publish, take and release in any order.

    Its model: the blocks that each live sequence holds, and the block that was published under each key.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.live: list[SequenceKV] = []
        self.published: dict[bytes, int] = {}

    def _held(self) -> set[int]:
        return {block for kv in self.live for block in kv.blocks}

    @rule(target=sequences)
    def start(self) -> SequenceKV:
        self.live.append(SequenceKV())
        return self.live[-1]

    @rule(kv=sequences, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE))
    def reserve(self, kv: SequenceKV, num_tokens: int) -> None:
        before, others = list(kv.blocks), self._held()
        missing = max(-(-num_tokens // BLOCK_SIZE) - len(before), 0)
        fits = missing <= self.allocator.num_free
        assert self.allocator.reserve(kv, num_tokens) == fits
        new = kv.blocks[len(before) :]
        assert kv.blocks[: len(before)] == before
        assert len(new) == (missing if fits else 0)
        assert not others & set(new)
        self.published = {key: block for key, block in self.published.items() if block not in new}

    @rule(kv=sequences, share=st.floats(0, 1), draft_share=st.floats(0, 1))
    def commit(self, kv: SequenceKV, share: float, draft_share: float) -> None:
        kv.committed = max(kv.committed, int(share * len(kv.blocks) * BLOCK_SIZE))
        kv.draft_kv_len = int(draft_share * kv.committed)
        kv.published = kv.committed // BLOCK_SIZE

    @rule(target=sequences, parent=sequences, num_tokens=st.integers(0, NUM_BLOCKS * BLOCK_SIZE))
    def fork(self, parent: SequenceKV, num_tokens: int) -> SequenceKV:
        free = self.allocator.num_free
        child = self.allocator.fork(parent, num_tokens)
        full_blocks = min(num_tokens, parent.committed) // BLOCK_SIZE
        assert child.blocks == parent.blocks[:full_blocks]
        assert child.committed == full_blocks * BLOCK_SIZE
        assert child.draft_kv_len == min(child.committed, parent.draft_kv_len)
        assert child.published == min(full_blocks, parent.published)
        assert self.allocator.num_free == free
        self.live.append(child)
        return child

    @rule(kv=sequences, index=st.integers(0, NUM_BLOCKS), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, kv: SequenceKV, index: int, key: bytes) -> None:
        for block in kv.blocks[index : index + 1]:
            self.allocator.publish(block, key)
            if key not in self.published and block not in self.published.values():
                self.published[key] = block

    @rule(target=sequences, keys=st.permutations([b"a", b"b", b"c", b"d", b"never"]))
    def take_published(self, keys: list[bytes]) -> SequenceKV:
        found = [self.published[key] for key in itertools.takewhile(self.published.__contains__, keys)]
        kv = SequenceKV(self.allocator.take_published(keys))
        assert kv.blocks == found
        self.live.append(kv)
        return kv

    @rule(kv=consumes(sequences))
    def release(self, kv: SequenceKV) -> None:
        self.live = [other for other in self.live if other is not kv]
        own = set(kv.blocks) - self._held()
        free = self.allocator.num_free
        self.allocator.release(kv)
        assert self.allocator.num_free == free + len(own)
        assert kv == SequenceKV()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.allocator.check(self.live)
        assert self.allocator.num_free == NUM_BLOCKS - 1 - len(self._held())
        assert 0 not in self._held()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_capacity_leaves_out_the_scratch_block() -> None:
    assert BlockAllocator(NUM_BLOCKS, BLOCK_SIZE).capacity == (NUM_BLOCKS - 1) * BLOCK_SIZE


def test_a_forked_sequence_does_not_see_the_growth_of_its_parent() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    parent = SequenceKV()
    allocator.reserve(parent, 8)
    parent.committed = 8
    child = allocator.fork(parent, 8)
    allocator.reserve(parent, 16)
    assert len(child.blocks) == 2


def published(allocator: BlockAllocator, keys: Sequence[bytes]) -> SequenceKV:
    """A sequence with one new block per key."""
    kv = SequenceKV()
    assert allocator.reserve(kv, len(keys) * BLOCK_SIZE)
    for block, key in zip(kv.blocks, keys, strict=True):
        allocator.publish(block, key)
    return kv


def findable(allocator: BlockAllocator, keys: Sequence[bytes]) -> list[bytes]:
    """Return those of the keys that are found now. Nothing changes but the order of eviction."""
    found = []
    for key in keys:
        kv = SequenceKV(allocator.take_published([key]))
        found += [key] * len(kv.blocks)
        allocator.release(kv)
    return found


def test_free_blocks_are_taken_before_published_ones() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    allocator.release(published(allocator, [b"a", b"b"]))
    allocator.reserve(SequenceKV(), (NUM_BLOCKS - 3) * BLOCK_SIZE)
    assert findable(allocator, [b"a", b"b"]) == [b"a", b"b"]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    allocator = BlockAllocator(4, BLOCK_SIZE)
    allocator.release(published(allocator, [b"a", b"b", b"c"]))
    allocator.reserve(SequenceKV(), BLOCK_SIZE)
    assert findable(allocator, [b"a", b"b", b"c"]) == [b"a", b"b"]


def test_the_least_recently_used_block_is_evicted() -> None:
    """A block counts as used while it is held: "a" was published first, but held last."""
    allocator = BlockAllocator(4, BLOCK_SIZE)
    for key in (b"a", b"b", b"c"):
        allocator.release(published(allocator, [key]))
    allocator.release(SequenceKV(allocator.take_published([b"a"])))
    allocator.reserve(SequenceKV(), 2 * BLOCK_SIZE)
    assert findable(allocator, [b"a", b"b", b"c"]) == [b"a"]


def test_a_published_block_that_is_held_is_not_evicted() -> None:
    allocator = BlockAllocator(4, BLOCK_SIZE)
    allocator.release(published(allocator, [b"a", b"b"]))
    holder = SequenceKV(allocator.take_published([b"a"]))
    assert not allocator.reserve(SequenceKV(), 3 * BLOCK_SIZE)
    assert allocator.reserve(SequenceKV(), 2 * BLOCK_SIZE)
    assert findable(allocator, [b"a", b"b"]) == [b"a"]
    assert len(holder.blocks) == 1


def test_a_second_block_of_the_same_key_is_free_when_it_is_released() -> None:
    allocator = BlockAllocator(3, BLOCK_SIZE)
    first, second = published(allocator, [b"a"]), published(allocator, [b"a"])
    (block,) = first.blocks
    allocator.release(first)
    allocator.release(second)
    allocator.reserve(SequenceKV(), BLOCK_SIZE)
    assert allocator.take_published([b"a"]) == [block]


def test_a_fork_keeps_a_published_block_from_eviction() -> None:
    allocator = BlockAllocator(3, BLOCK_SIZE)
    parent = published(allocator, [b"a"])
    parent.committed = BLOCK_SIZE
    child = allocator.fork(parent, BLOCK_SIZE)
    allocator.release(parent)
    assert allocator.num_free == 1
    allocator.release(child)
    assert allocator.num_free == 2
    assert findable(allocator, [b"a"]) == [b"a"]


def test_check_names_a_leaked_block() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    lost = SequenceKV()
    allocator.reserve(lost, 1)
    with pytest.raises(AssertionError, match=f"KV block {lost.blocks[0]}: 1 references, 0 owners"):
        allocator.check([])


def test_check_names_a_leaked_published_block() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    (block,) = published(allocator, [b"a"]).blocks
    with pytest.raises(AssertionError, match=f"KV block {block}: 1 references, 0 owners"):
        allocator.check([])


def test_check_names_a_free_block_that_is_still_published() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    kv = SequenceKV()
    allocator.reserve(kv, 1)
    (block,) = kv.blocks
    allocator.release(kv)
    allocator.publish(block, b"a")  # allowed only for owned blocks
    with pytest.raises(AssertionError, match=f"KV block {block} is free but published"):
        allocator.check([])


def test_check_names_a_block_that_was_given_back_twice() -> None:
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    kv = SequenceKV()
    allocator.reserve(kv, 1)
    twin = SequenceKV(blocks=list(kv.blocks))
    allocator.release(kv)
    with pytest.raises(AssertionError, match=f"KV block {twin.blocks[0]}: 0 references, 1 owners"):
        allocator.check([twin])


@st.composite
def verdicts(draw: st.DrawFn) -> tuple[SequenceKV, int, int, int]:
    """Return (cache, known rows of the step, drafts, emitted tokens). Only a chunk without drafts emits 0 tokens."""
    committed = draw(st.integers(0, 100))
    known = draw(st.integers(1, 30))
    drafts = draw(st.integers(0, 8)) if known == 1 else 0
    num_tokens = draw(st.integers(0 if known > 1 else 1, drafts + 1))
    # The draft's KV may be ahead of the target's by up to its own drafts, or the drafter may not have run at all.
    draft_len = draw(st.integers(0, committed + known + max(drafts - 1, 0)))
    return SequenceKV(committed=committed, draft_kv_len=draft_len), known, drafts, num_tokens


@given(verdicts())
def test_commit_keeps_known_rows_and_accepted_drafts(verdict: tuple[SequenceKV, int, int, int]) -> None:
    kv, known, drafts, num_tokens = verdict
    before = kv.committed
    rewind.commit(kv, known + drafts, num_tokens, drafts)
    assert kv.committed == before + known + max(num_tokens - 1, 0)


@given(verdicts())
def test_commit_truncates_draft_kv_to_what_the_target_kept(verdict: tuple[SequenceKV, int, int, int]) -> None:
    kv, known, drafts, num_tokens = verdict
    before = kv.draft_kv_len
    rewind.commit(kv, known + drafts, num_tokens, drafts)
    assert kv.draft_kv_len == min(before, kv.committed)


@given(verdicts())
def test_commit_never_gives_blocks_back(verdict: tuple[SequenceKV, int, int, int]) -> None:
    kv, known, drafts, num_tokens = verdict
    kv.blocks = [3, 1, 2]
    rewind.commit(kv, known + drafts, num_tokens, drafts)
    assert kv.blocks == [3, 1, 2]


def test_debug_mode_sees_a_block_freed_in_flight() -> None:
    """A block that becomes free must not be part of a step in flight.

    A shared block stays as long as a sequence holds it.
    """
    allocator = BlockAllocator(9, 2, debug=True)
    kv = SequenceKV()
    allocator.reserve(kv, 6)
    kv.committed = 4
    sibling = allocator.fork(kv, 4)
    for _ in range(2):  # two steps in flight
        allocator.pin(kv)
    allocator.release(sibling)
    with pytest.raises(AssertionError, match="in flight"):
        allocator.release(kv)
    allocator = BlockAllocator(9, 2, debug=True)
    allocator.reserve(kv := SequenceKV(), 6)
    for _ in range(2):
        allocator.pin(kv)
        allocator.reserve(kv, len(kv.blocks) * 2 + 2)
    allocator.unpin(kv)
    with pytest.raises(AssertionError, match="in flight"):
        allocator.release(kv)
    allocator = BlockAllocator(9, 2, debug=True)
    allocator.reserve(kv := SequenceKV(), 6)
    allocator.pin(kv)
    allocator.unpin(kv)
    allocator.release(kv)
    assert allocator.num_free == 8
