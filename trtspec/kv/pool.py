"""The cache's tensors: one K and one V tensor a layer, in blocks, target and draft layers under the same block ids."""

from __future__ import annotations

import torch

from trtspec.core import KVLayer
from trtspec.models.specs import DecoderSpec


def allocate_layers(spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[KVLayer, ...]:
    """A pair (k_cache, v_cache) per layer of `spec`, each [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return tuple((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(spec.num_layers))
