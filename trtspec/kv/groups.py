"""Groups of KV layers that share a block table.

Layers with the same sliding window form a group, as they forget the same tokens. A token has its KV of all layers of a
group in the same block. Another group may keep it in another block or, past the window, no longer at all. Group 0 is
that of the first layer. Its table is AttnMetadata.block_tables; AttnMetadata.group_tables are those of the others.

Slots follow from a table (ops.attention.row_slots), so each group has slots of its own. Positions that a table does not
cover lie in block 0, which is scratch in every group. Positions past max_seq_len are among them.

The engine makes one group. Its allocator (kv/blocks.py) gives a sequence blocks that hold a token's KV of all layers.
Its batches have no group_tables, so the layers of every group use the one table. A table for each group is for code
that launches steps with an allocation of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtspec.core import AttnMetadata


def layer_groups(windows: Sequence[int | None]) -> tuple[int, ...]:
    """Group of each layer, numbered in order of appearance.

    windows: sliding window of each layer, None = all tokens.
    """
    order = list(dict.fromkeys(windows))
    return tuple(order.index(window) for window in windows)


def with_group_tables(
    attn: AttnMetadata, groups: Sequence[int], tables: Sequence[Sequence[Sequence[int]]]
) -> AttnMetadata:
    """Return the same rows, with a block table for each group.

    tables: those of groups 1, 2, ..., each with the blocks of every request; attn has that of group 0. groups: group of
    each layer, from layer_groups. ValueError for a wrong number of tables, or of requests in one.
    """
    count = max(groups, default=0)
    if len(tables) != count or any(len(table) != attn.batch_size for table in tables):
        raise ValueError(
            f"block tables of {[len(table) for table in tables]} requests; want one for each of {attn.batch_size} "
            f"requests in each of {count} groups after the first"
        )
    rows = AttnMetadata.pad_tables([blocks for table in tables for blocks in table]) if tables else None
    return replace(attn, group_tables=None if rows is None else rows.view(count, attn.batch_size, rows.shape[1]))
