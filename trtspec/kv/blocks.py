"""Ownership of KV blocks. A sequence reserves blocks before a step; what it has *committed* is a separate number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceKV:
    """One sequence's share of the cache. Blocks past `committed` are a reservation, not a length."""

    # The list only ever grows; releasing blocks starts a new one. So a list object and its length tell the contents.
    blocks: list[int] = field(default_factory=list)
    committed: int = 0  # leading tokens whose target KV is valid
    draft_kv_len: int = 0  # leading tokens whose draft KV is valid
    published: int = 0  # leading blocks that were published for reuse, or taken over
    drafted: int = 0  # those of them that were published as valid in draft KV too
    keys: list[bytes] = field(default_factory=list, compare=False, repr=False)  # one for each full block, see kv.reuse


class BlockAllocator:
    """An allocator of blocks 1..num_blocks-1, which are shared by reference count. Block 0 is scratch and has no owner.

    A published block can be found by its key, even after its last owner has released it, until it is evicted.
    `debug`: AssertionError if a block becomes free while a step that includes its owner is in flight.
    """

    def __init__(self, num_blocks: int, block_size: int, debug: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.debug = debug
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks
        self._published: dict[bytes, int] = {}  # key -> block
        self._keys: dict[int, bytes] = {}  # block -> key, the same pairs
        self._drafted: set[int] = set()  # published blocks that are valid in draft KV too
        self._evictable: dict[int, None] = {}  # published blocks without an owner, least recently used first
        self._pinned: dict[int, list[list[int]]] = {}  # debug: blocks of each sequence in every step in flight

    @property
    def num_free(self) -> int:
        """Number of blocks that can be reserved: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the empty cache."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reserve(self, kv: SequenceKV, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all. False, and nothing changed, if there are not enough free blocks."""
        if num_tokens <= len(kv.blocks) * self.block_size:
            return True
        missing = self.blocks_for(num_tokens) - len(kv.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            kv.blocks.append(block)
        return True

    def fork(self, parent: SequenceKV, num_tokens: int) -> SequenceKV:
        """A new sequence that shares the parent's full blocks of its first `num_tokens` committed tokens."""
        shared = min(num_tokens, parent.committed) // self.block_size
        blocks = parent.blocks[:shared]
        for block in blocks:
            self._references[block] += 1
        rows = shared * self.block_size
        return SequenceKV(
            blocks=list(blocks),
            committed=rows,
            draft_kv_len=min(rows, parent.draft_kv_len),
            published=min(shared, parent.published),
            drafted=min(shared, parent.drafted),
            keys=parent.keys[:shared],
        )

    def publish(self, block: int, key: bytes, drafted: bool = False) -> None:
        """Publish an owned block under its key. If another block has the key already, this one remains private.

        drafted: it is valid in draft KV too. Then it takes the place of a block that is not.
        """
        held = self._published.get(key)
        if block not in self._keys and (held is None or (drafted and held not in self._drafted)):
            if held is not None:
                self._withdraw(held)
            self._published[key] = held = block
            self._keys[block] = key
        if drafted and held == block:
            self._drafted.add(block)

    def take_published(self, keys: Iterable[bytes], drafted: bool = False) -> list[int]:
        """The blocks of the leading keys that are published, each with one more reference.

        drafted: only blocks that are valid in draft KV too.
        """
        blocks = []
        for key in keys:
            block = self._published.get(key)
            if block is None or (drafted and block not in self._drafted):
                break
            self._evictable.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def num_drafted(self, blocks: Sequence[int]) -> int:
        """Number of leading blocks that are published as valid in draft KV too."""
        return next((i for i, block in enumerate(blocks) if block not in self._drafted), len(blocks))

    def release(self, kv: SequenceKV) -> None:
        """Release every block. Published ones can be found until they are evicted. Keys stay, as tokens do."""
        for block in reversed(kv.blocks):  # tail first, to be evicted first: it is never found without its head
            self._references[block] -= 1
            if self._references[block] == 0:
                if self.debug:
                    self._check_landed(block)
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
        kv.blocks = []
        kv.committed = kv.draft_kv_len = kv.published = kv.drafted = 0

    def pin(self, kv: SequenceKV) -> None:
        """Record that a step in flight includes the sequence with its present blocks. No effect without `debug`."""
        if self.debug:
            self._pinned.setdefault(id(kv), []).append(list(kv.blocks))

    def unpin(self, kv: SequenceKV) -> None:
        """Record that the oldest step in flight with this sequence is over."""
        if self.debug:
            pins = self._pinned[id(kv)]
            pins.pop(0)
            if not pins:
                del self._pinned[id(kv)]

    def _check_landed(self, block: int) -> None:
        if any(block in pinned for pins in self._pinned.values() for pinned in pins):
            raise AssertionError(f"KV block {block} becomes free while a step that includes its owner is in flight")

    @property
    def is_whole(self) -> bool:
        """Whether all blocks but scratch are free or evictable."""
        return self.num_free == self.num_blocks - 1

    def check(self, live: Iterable[SequenceKV]) -> None:
        """Account for every block: it is free, evictable, or held by as many live sequences as it has references.

        AssertionError says which block is wrong. Where no block may be held, `is_whole` is cheaper.
        """
        held = Counter(block for kv in live for block in kv.blocks)
        free = Counter((*self._free, *self._evictable))
        for block in range(1, self.num_blocks):
            references, owners, listed = self._references[block], held[block], free[block]
            if references != owners or listed != (references == 0):
                raise AssertionError(
                    f"KV block {block}: {references} references, {owners} owners, {listed} times free or evictable"
                )
            if references == 0 and (block in self._keys) != (block in self._evictable):
                raise AssertionError(f"KV block {block} is free but published, or evictable but not published")
        if held[0] or free[0]:
            raise AssertionError("KV block 0 is scratch, yet it is owned or free")
        if self._keys != {block: key for key, block in self._published.items()}:
            raise AssertionError("published KV blocks and their keys do not agree")
        if not self._drafted <= set(self._keys):
            raise AssertionError("KV blocks that are not published count as valid in draft KV")

    def _evict(self) -> int:
        """Stop publishing the least recently used block without an owner, and return it."""
        self._withdraw(next(iter(self._evictable)))
        return self._free.pop()

    def _withdraw(self, block: int) -> None:
        """Stop publishing a block. It is free if it has no owner."""
        del self._published[self._keys.pop(block)]
        self._drafted.discard(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)
