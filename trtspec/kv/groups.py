"""Which KV layers share a block table.

Layers that forget alike, those of the same sliding window, are a group: a token has its KV of all of them in the same
block. Another group may have it elsewhere, or, behind its window, no longer. Group 0 is that of the first layer, and
AttnMetadata.block_tables is its table; AttnMetadata.group_tables are those of the others. Slots follow from a table
(ops.attention.row_slots), so each group has slots of its own: what its table does not cover, positions past max_seq_len
among it, lies in block 0, which is scratch in every group.

The engine makes one group: its allocator (kv/blocks.py) gives a sequence blocks that hold a token's KV of all layers,
and its batches have no group_tables, so that layers of every group lie under the one table. Tables for each are for who
launches steps on an allocation of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtspec.core import AttnMetadata


def layer_groups(windows: Sequence[int | None]) -> tuple[int, ...]:
    """The group of each layer, numbered as they come; windows: sliding window of each, None = all."""
    order = list(dict.fromkeys(windows))
    return tuple(order.index(window) for window in windows)


def with_group_tables(
    attn: AttnMetadata, groups: Sequence[int], tables: Sequence[Sequence[Sequence[int]]]
) -> AttnMetadata:
    """The same rows, with a table for each group: `tables` of 1, 2, ..., in each the blocks of every request; attn has
    that of group 0. groups: see layer_groups. ValueError where it does not have so many, or not so many requests."""
    count = max(groups, default=0)
    if len(tables) != count or any(len(table) != attn.batch_size for table in tables):
        raise ValueError(
            f"block tables of {[len(table) for table in tables]} requests; want one for each of {attn.batch_size} "
            f"requests in each of {count} groups behind the first"
        )
    rows = AttnMetadata.pad_tables([blocks for table in tables for blocks in table]) if tables else None
    return replace(attn, group_tables=None if rows is None else rows.view(count, attn.batch_size, rows.shape[1]))
