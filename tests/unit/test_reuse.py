"""The blocks that a sequence publishes, and those of them that another sequence may take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from trtspec.kv import reuse
from trtspec.kv.blocks import BlockAllocator, SequenceKV
from trtspec.kv.reuse import PrefixReuse, extend_keys

SIZE = 4  # tokens per block
TOKENS = list(range(100, 140))


def make_reuse(num_blocks: int = 40, keeps_draft_kv: bool = False, shifted: bool = False) -> PrefixReuse:
    return PrefixReuse(BlockAllocator(num_blocks, SIZE), keeps_draft_kv, shifted)


def computed(sharing: PrefixReuse, tokens: Sequence[int], draft_len: int | None = None) -> SequenceKV:
    """A sequence that has computed all its tokens itself, `draft_len` of them in draft KV, and has published them."""
    kv = SequenceKV()
    assert sharing.allocator.reserve(kv, len(tokens))
    kv.committed = len(tokens)
    kv.draft_kv_len = len(tokens) if draft_len is None else draft_len
    sharing.publish(kv, tokens)
    return kv


def found(sharing: PrefixReuse, tokens: Sequence[int], drafted: bool = True) -> SequenceKV:
    kv = SequenceKV()
    sharing.find(kv, tokens, drafted)
    return kv


# -- how much is found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 4 * SIZE + 2))
def test_one_row_is_always_computed(length: int) -> None:
    sharing = make_reuse()
    kv = computed(sharing, TOKENS)
    assert found(sharing, TOKENS[:length]).blocks == kv.blocks[: (length - 1) // SIZE]


@pytest.mark.parametrize("length", range(1, 4 * SIZE + 2))
def test_shifted_draft_layers_cost_one_block(length: int) -> None:
    sharing = make_reuse(keeps_draft_kv=True, shifted=True)
    kv = computed(sharing, TOKENS)
    assert found(sharing, TOKENS[:length]).blocks == kv.blocks[: max((length - 1) // SIZE - 1, 0)]


@pytest.mark.parametrize("committed", range(1, 4 * SIZE + 2))
def test_provisional_rows_do_not_count_as_drafted(committed: int) -> None:
    """The last two rows of a chunk, which will be computed again, are not valid in draft KV though tokens are known."""
    sharing = PrefixReuse(BlockAllocator(40, SIZE), keeps_draft_kv=True, shifted=True, provisional=2)
    kv = SequenceKV()
    assert sharing.allocator.reserve(kv, len(TOKENS))
    kv.committed = kv.draft_kv_len = committed
    sharing.publish(kv, TOKENS)
    assert found(sharing, TOKENS).blocks == kv.blocks[: max(committed - 2, 0) // SIZE]
    assert found(sharing, TOKENS, drafted=False).blocks == kv.blocks[: min(committed // SIZE, 8)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("same", range(4 * SIZE + 1))
def test_only_blocks_of_the_same_tokens_are_found(same: int, shifted: bool) -> None:
    sharing = make_reuse(shifted=shifted)
    computed(sharing, TOKENS)
    tokens = TOKENS[:same] + [1] * 20
    assert len(found(sharing, tokens).blocks) == max(same // SIZE - shifted, 0)


def test_equal_blocks_after_different_ones_are_not_found() -> None:
    sharing = make_reuse()
    computed(sharing, [1] * SIZE + [2] * SIZE + [3])
    assert found(sharing, [4] * SIZE + [2] * SIZE + [3]).blocks == []


@pytest.mark.parametrize("keeps_draft_kv", [False, True])
def test_rows_found_count_as_computed(keeps_draft_kv: bool) -> None:
    sharing = make_reuse(keeps_draft_kv=keeps_draft_kv)
    computed(sharing, TOKENS)
    kv = found(sharing, TOKENS[: 3 * SIZE])
    assert (kv.committed, kv.draft_kv_len) == (2 * SIZE, 2 * SIZE if keeps_draft_kv else 0)


def test_a_sequence_that_was_released_finds_its_own_blocks_again() -> None:
    sharing = make_reuse()
    kv = computed(sharing, TOKENS)
    blocks = list(kv.blocks)
    sharing.allocator.release(kv)
    sharing.find(kv, TOKENS)
    assert kv.blocks == blocks[:-1]
    sharing.allocator.check([kv])


def test_what_was_evicted_is_not_found() -> None:
    sharing = make_reuse(num_blocks=11)
    sharing.allocator.release(computed(sharing, TOKENS))  # all ten blocks
    other = SequenceKV()
    sharing.allocator.reserve(other, 8 * SIZE)
    assert len(found(sharing, TOKENS).blocks) == 2


# -- what is published ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", range(3 * SIZE + 1))
def test_only_committed_rows_are_published(committed: int) -> None:
    sharing = make_reuse()
    kv = SequenceKV()
    sharing.allocator.reserve(kv, len(TOKENS))
    kv.committed = kv.draft_kv_len = committed
    sharing.publish(kv, TOKENS)
    assert found(sharing, TOKENS).committed == committed // SIZE * SIZE


@pytest.mark.parametrize("draft_len", range(3 * SIZE + 1))
def test_who_wants_draft_kv_finds_only_rows_that_have_it(draft_len: int) -> None:
    sharing = make_reuse(keeps_draft_kv=True)
    computed(sharing, TOKENS, draft_len)
    valid = draft_len // SIZE * SIZE
    assert found(sharing, TOKENS).committed == valid
    kv = found(sharing, TOKENS, drafted=False)
    assert (kv.committed, kv.draft_kv_len) == (9 * SIZE, valid)


def test_blocks_become_valid_in_draft_kv_later() -> None:
    """Both in the sequence that published them, and in one that took them over."""
    sharing = make_reuse(keeps_draft_kv=True)
    kv = computed(sharing, TOKENS, draft_len=0)
    kv.draft_kv_len = 2 * SIZE
    sharing.publish(kv, TOKENS)
    other = found(sharing, TOKENS, drafted=False)
    assert (other.blocks, other.draft_kv_len) == (kv.blocks[:9], 2 * SIZE)
    other.draft_kv_len = 5 * SIZE
    sharing.publish(other, TOKENS)
    assert found(sharing, TOKENS).blocks == kv.blocks[:5]


@pytest.mark.parametrize("owned", [True, False])
def test_a_block_with_draft_kv_takes_the_place_of_one_without(owned: bool) -> None:
    sharing = make_reuse(keeps_draft_kv=True)
    first = computed(sharing, TOKENS, draft_len=0)
    if not owned:
        sharing.allocator.release(first)
    second = computed(sharing, TOKENS, draft_len=3 * SIZE)
    live = [second, found(sharing, TOKENS)]
    assert live[1].blocks == second.blocks[:3]
    sharing.allocator.check([*live, first])
    third = computed(sharing, TOKENS, draft_len=3 * SIZE)  # a duplicate
    assert not set(found(sharing, TOKENS).blocks) & set(third.blocks)
    sharing.allocator.release(second)
    sharing.allocator.release(live[1])
    evicting = SequenceKV()
    assert sharing.allocator.reserve(evicting, sharing.allocator.num_free * SIZE)
    assert sharing.allocator.num_drafted(second.blocks) == 0


def test_without_draft_kv_its_length_does_not_matter() -> None:
    sharing = make_reuse()
    computed(sharing, TOKENS, draft_len=0)
    assert found(sharing, TOKENS).committed == 9 * SIZE


def test_draft_kv_ahead_of_the_target_does_not_publish() -> None:
    """Draft KV ahead of the target holds drafts of the next step, which are not verified yet."""
    sharing = make_reuse(keeps_draft_kv=True)
    kv = SequenceKV(committed=SIZE, draft_kv_len=3 * SIZE)
    sharing.allocator.reserve(kv, 3 * SIZE)
    sharing.publish(kv, TOKENS[: 3 * SIZE])
    assert found(sharing, TOKENS).committed == SIZE


def test_rows_after_a_stop_are_not_published() -> None:
    """Accepted drafts after a stop are committed, but they are not the request's tokens."""
    sharing = make_reuse()
    kv = SequenceKV()
    sharing.allocator.reserve(kv, 2 * SIZE)
    kv.committed = 2 * SIZE
    sharing.publish(kv, TOKENS[: 2 * SIZE - 1])
    assert found(sharing, TOKENS).committed == SIZE


def test_what_is_published_later_extends_what_was_published_before() -> None:
    sharing = make_reuse()
    kv = SequenceKV()
    sharing.allocator.reserve(kv, len(TOKENS))
    for committed in range(len(TOKENS) + 1):
        kv.committed = committed
        sharing.publish(kv, TOKENS[:committed])
    assert found(sharing, TOKENS).blocks == kv.blocks[:-1]


def test_a_sequence_that_is_computed_again_without_a_look_publishes_again() -> None:
    sharing = make_reuse(num_blocks=11)
    kv = computed(sharing, TOKENS)
    for _ in range(2):  # the first time its own blocks are evicted to make room for the new ones
        sharing.allocator.release(kv)
        sharing.allocator.reserve(kv, len(TOKENS))
    kv.committed = len(TOKENS)
    sharing.publish(kv, TOKENS)
    assert found(sharing, TOKENS).blocks == kv.blocks[:-1]


def test_a_duplicate_stays_private() -> None:
    sharing = make_reuse()
    first, second = computed(sharing, TOKENS), computed(sharing, TOKENS)
    assert found(sharing, TOKENS).blocks == first.blocks[:-1]
    sharing.allocator.release(second)
    assert found(sharing, TOKENS).blocks == first.blocks[:-1]


def test_shifted_rows_are_taken_from_who_went_on_in_the_same_way() -> None:
    """Shifted rows are taken from the sequence that went on with the same tokens.

    The last draft row of block 1 has read the first token of block 2. If keys left that token out, the second
    publisher's block 1 would be a duplicate. The third sequence would then read draft KV of two sequences that differ.
    """
    sharing = make_reuse(keeps_draft_kv=True, shifted=True)
    head = TOKENS[: 2 * SIZE]
    one, two = head + [1] * 3 * SIZE, head + [2] * 3 * SIZE
    computed(sharing, one)
    kv = found(sharing, two)
    sharing.allocator.reserve(kv, len(two))
    kv.committed = kv.draft_kv_len = len(two)
    sharing.publish(kv, two)
    assert len(set(kv.blocks)) == 5
    assert found(sharing, two).blocks == kv.blocks[:3]


# -- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fork_publishes_what_it_adds(when: str, shifted: bool) -> None:
    """A fork's own blocks are found after its shared blocks.

    The shared blocks are published already, or will be by the first sequence to publish them.
    """
    sharing = make_reuse(shifted=shifted)
    parent = SequenceKV()
    sharing.allocator.reserve(parent, len(TOKENS))
    parent.committed = 3 * SIZE
    if when == "after":
        sharing.publish(parent, TOKENS[: 4 * SIZE])
    child = sharing.allocator.fork(parent, 3 * SIZE)
    sharing.allocator.release(parent)
    sharing.allocator.reserve(child, len(TOKENS))
    child.committed = len(TOKENS)
    sharing.publish(child, TOKENS)
    assert found(sharing, TOKENS).blocks == child.blocks[: 9 - shifted]
    assert child.keys == computed(make_reuse(), TOKENS).keys


def test_a_fork_does_not_take_over_the_keys_of_what_it_does_not_share() -> None:
    sharing = make_reuse()
    child = sharing.allocator.fork(computed(sharing, TOKENS), 2 * SIZE)
    tokens = TOKENS[: 2 * SIZE] + [1] * 2 * SIZE
    sharing.allocator.reserve(child, len(tokens))
    child.committed = len(tokens)
    sharing.publish(child, tokens)
    assert found(sharing, [*tokens, 1]).blocks == child.blocks


def test_forks_that_went_on_differently_publish_their_last_shared_block_once() -> None:
    """With shifted layers, the last shared block has two keys, one per continuation. The first key stays."""
    sharing = make_reuse(shifted=True)
    parent = computed(sharing, TOKENS[: 2 * SIZE])
    child = sharing.allocator.fork(parent, 2 * SIZE)
    for kv, token in ((parent, 1), (child, 2)):
        tokens = TOKENS[: 2 * SIZE] + [token] * 2 * SIZE
        sharing.allocator.reserve(kv, len(tokens))
        kv.committed = len(tokens)
        sharing.publish(kv, tokens)
    assert len(found(sharing, TOKENS[: 2 * SIZE] + [1] * 3 * SIZE).blocks) == 3
    assert len(found(sharing, TOKENS[: 2 * SIZE] + [2] * 3 * SIZE).blocks) == 1


# -- keys ----------------------------------------------------------------------------------------------------------


def test_keys_are_chained_digests_of_ids_as_int64() -> None:
    keys: list[bytes] = []
    extend_keys(keys, TOKENS[: 2 * SIZE + 1], SIZE)
    first = hashlib.sha256(b"".join(token.to_bytes(8, "little") for token in TOKENS[:SIZE])).digest()
    rest = b"".join(token.to_bytes(8, "little") for token in TOKENS[SIZE : 2 * SIZE])
    assert keys == [first, hashlib.sha256(first + rest).digest()]


def test_a_step_costs_its_new_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is hashed once in the life of a sequence, and offered once each time it is computed."""
    hashed, offered = [], []
    sha256 = hashlib.sha256
    monkeypatch.setattr(reuse.hashlib, "sha256", lambda data: hashed.append(data) or sha256(data))
    monkeypatch.setattr(BlockAllocator, "publish", lambda self, block, key: offered.append(block))
    sharing = make_reuse()
    kv = SequenceKV()
    for _ in range(3):  # preempted twice
        sharing.find(kv, TOKENS[:SIZE])
        sharing.allocator.reserve(kv, len(TOKENS))
        for committed in range(len(TOKENS) + 1):
            kv.committed = committed
            sharing.publish(kv, TOKENS[:committed])
        sharing.allocator.release(kv)
    num_blocks = len(TOKENS) // SIZE
    assert len(hashed) == len(set(hashed)) == num_blocks
    assert len(offered) == 3 * num_blocks
