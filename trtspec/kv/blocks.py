"""Who owns which block. A sequence reserves blocks before a step; what it has *committed* is a separate number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class SequenceKV:
    """One sequence's share of the cache. Blocks may reach past `committed`: that is a reservation, not a length."""

    blocks: list[int] = field(default_factory=list)
    committed: int = 0  # leading tokens whose target KV is valid
    draft_len: int = 0  # leading tokens whose draft KV is valid


class BlockAllocator:
    """Blocks 1..num_blocks-1, shared by reference count; block 0 is scratch and belongs to nobody."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit when nobody else is there."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reserve(self, kv: SequenceKV, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all. False, and nothing changed, if there are not enough free blocks."""
        missing = self.blocks_for(num_tokens) - len(kv.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
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
        return SequenceKV(blocks=list(blocks), committed=rows, draft_len=min(rows, parent.draft_len))

    def release(self, kv: SequenceKV) -> None:
        """Give every block back and forget the contents."""
        for block in reversed(kv.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        kv.blocks.clear()
        kv.committed = kv.draft_len = 0

    def check(self, live: Iterable[SequenceKV]) -> None:
        """Account for every block: each is free or held by exactly as many live sequences as it has references.

        Raises AssertionError that says which block is wrong. Cheap enough to run whenever the engine is idle.
        """
        held = Counter(block for kv in live for block in kv.blocks)
        free = Counter(self._free)
        for block in range(1, self.num_blocks):
            references, owners, listed = self._references[block], held[block], free[block]
            if references != owners or listed != (references == 0):
                raise AssertionError(
                    f"KV block {block}: {references} references, {owners} owners, {listed} times in the free list"
                )
        if held[0] or free[0]:
            raise AssertionError("KV block 0 is scratch, yet it is owned or free")
