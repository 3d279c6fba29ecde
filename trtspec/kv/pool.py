"""The cache's tensors: one K and one V tensor a layer, in blocks, target and draft layers under the same block ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.core import KVLayer


def allocate_layers(
    shapes: Sequence[tuple[int, int]], num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[KVLayer, ...]:
    """A pair (k_cache, v_cache) per (num_kv_heads, head_dim), each [num_blocks, block_size, num_kv_heads, head_dim],
    zeroed."""
    sizes = [(num_blocks, block_size, heads, head_dim) for heads, head_dim in shapes]
    return tuple((torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for size in sizes)
