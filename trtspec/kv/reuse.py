"""Prefix reuse: a request takes over the blocks of an earlier request as far as their tokens are the same.

A full block is found by its key, a digest of all tokens up to the end of the block. Blocks with equal keys hold equal
KV. The key is a digest and not a hash, so that no collision can put the KV of another text in its place.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from trtspec.kv.blocks import BlockAllocator, SequenceKV


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int) -> None:
    """Append the keys of the full blocks of `tokens` that have none yet: sha256(previous key + ids as int64)."""
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else b""
        keys.append(hashlib.sha256(parent + array("q", tokens[start : start + block_size]).tobytes()).digest())


@dataclass(frozen=True)
class PrefixReuse:
    """The rule of reuse: which blocks of a sequence may be published, and which published blocks a sequence may take.

    keeps_draft_kv: the mode has draft KV under the same block ids. Blocks are published when their rows are committed.
    Whether they are valid in draft KV too is part of what is published.
    shifted: that draft KV depends on later tokens (at position p on token p+1). Then a block is published under the key
    of the block *after* it. So only a sequence that shares the next block too finds it. A rule that only
    takes one block fewer would be wrong, since the blocks found may come from several sequences that went on
    differently.
    provisional: number of last rows that wait for later tokens and are computed again with them. They do not count as
    valid in draft KV.
    """

    allocator: BlockAllocator
    keeps_draft_kv: bool = False
    shifted: bool = False
    provisional: int = 0

    def publish(self, kv: SequenceKV, tokens: Sequence[int]) -> None:
        """Publish the blocks filled since the last call, and those that became valid in draft KV since then.

        There may be fewer tokens than committed rows. Rows after a stop were computed, but are not part of the
        request.
        """
        block_size = self.allocator.block_size
        extend_keys(kv.keys, tokens, block_size)
        most = len(kv.keys) - self.shifted
        valid = min(kv.committed, kv.draft_kv_len) - self.provisional if self.keeps_draft_kv else 0
        drafted, end = (min(rows // block_size, most) for rows in (valid, kv.committed))
        for i in range(kv.drafted, drafted):
            self.allocator.publish(kv.blocks[i], kv.keys[i + self.shifted], drafted=True)
        for i in range(max(kv.published, drafted), end):
            self.allocator.publish(kv.blocks[i], kv.keys[i + self.shifted])
        kv.published, kv.drafted = max(kv.published, end), max(kv.drafted, drafted)

    def find(self, kv: SequenceKV, tokens: Sequence[int], drafted: bool = True) -> None:
        """Give a sequence without blocks the published blocks that its tokens begin with.

        These are at most (len(tokens) - 1) // block_size, and one fewer if shifted. So one row is always computed, from
        which the next token is drawn. drafted: only blocks that are valid in draft KV too, if it is kept.
        """
        block_size = self.allocator.block_size
        extend_keys(kv.keys, tokens, block_size)
        keys = kv.keys[self.shifted : (len(tokens) - 1) // block_size]
        kv.blocks = self.allocator.take_published(keys, drafted and self.keeps_draft_kv)
        kv.published, kv.drafted = len(kv.blocks), self.allocator.num_drafted(kv.blocks)
        kv.committed, kv.draft_kv_len = kv.published * block_size, kv.drafted * block_size
