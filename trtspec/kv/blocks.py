"""Who owns which block. A sequence reserves blocks before a step; what it has *committed* is a separate number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceKV:
    """One sequence's share of the cache. Blocks may reach past `committed`: that is a reservation, not a length."""

    # The list only ever grows; who gives blocks back starts a new one. So a list and its length tell the contents.
    blocks: list[int] = field(default_factory=list)
    committed: int = 0  # leading tokens whose target KV is valid
    draft_len: int = 0  # leading tokens whose draft KV is valid
    published: int = 0  # leading blocks that were offered for reuse, or taken from there
    keys: list[bytes] = field(default_factory=list, compare=False, repr=False)  # of its tokens, see kv.reuse


class BlockAllocator:
    """Blocks 1..num_blocks-1, shared by reference count; block 0 is scratch and belongs to nobody.

    A published block is found by its key, also after its last owner has left, until somebody needs the room.
    `debug`: watch that no block becomes free while a step that includes its owner is in flight (AssertionError).
    """

    def __init__(self, num_blocks: int, block_size: int, debug: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.debug = debug
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks
        self._published: dict[bytes, int] = {}  # key -> block
        self._keys: dict[int, bytes] = {}  # block -> key, the same pairs
        self._evictable: dict[int, None] = {}  # published blocks without an owner, least recently used first
        self._pinned: dict[int, list[list[int]]] = {}  # debug: of each sequence, its blocks in every step in flight

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def capacity(self) -> int:
        """Tokens that fit when nobody else is there."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
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
            draft_len=min(rows, parent.draft_len),
            published=min(shared, parent.published),
            keys=parent.keys[:shared],
        )

    def publish(self, block: int, key: bytes) -> None:
        """Let an owned block be found. The first comer stays: another block with this key remains private."""
        if key not in self._published and block not in self._keys:
            self._published[key] = block
            self._keys[block] = key

    def take_published(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the leading keys that are published, each with one more reference."""
        blocks = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            self._evictable.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def release(self, kv: SequenceKV) -> None:
        """Give every block back and forget the contents; keys stay, they are of the tokens."""
        for block in reversed(kv.blocks):  # tail first: without its head a tail is never found, so it goes earlier
            self._references[block] -= 1
            if self._references[block] == 0:
                if self.debug:
                    self._check_landed(block)
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
        kv.blocks = []
        kv.committed = kv.draft_len = kv.published = 0

    def pin(self, kv: SequenceKV) -> None:
        """A step in flight includes the sequence, with the blocks it has now. Nothing is kept unless `debug`."""
        if self.debug:
            self._pinned.setdefault(id(kv), []).append(list(kv.blocks))

    def unpin(self, kv: SequenceKV) -> None:
        """The oldest of these steps is over."""
        if self.debug:
            pins = self._pinned[id(kv)]
            pins.pop(0)
            if not pins:
                del self._pinned[id(kv)]

    def _check_landed(self, block: int) -> None:
        if any(block in pinned for pins in self._pinned.values() for pinned in pins):
            raise AssertionError(f"KV block {block} becomes free while a step that includes its owner is in flight")

    def check(self, live: Iterable[SequenceKV]) -> None:
        """FieldMapper for every block: free, evictable, or held by exactly as many live sequences as it has references.

        Raises AssertionError that says which block is wrong. Cheap enough to run whenever the engine is idle.
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

    def _evict(self) -> int:
        """Stop publishing the least recently used block that nobody holds, and return it."""
        block = next(iter(self._evictable))
        del self._evictable[block], self._published[self._keys.pop(block)]
        return block
