"""Tensors of the KV cache: one K and one V tensor per layer, in blocks. Target and draft layers share the block ids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.core import KVLayer, KVSpec
from trtspec.errors import CapacityError
from trtspec.kv.memory import huge_pages, populate

_ALIGNMENT = 64  # elements: at least a cache line


def allocate_layers(
    specs: Sequence[KVSpec], num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[KVLayer, ...]:
    """Allocate a pair (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim] and zeroed.

    memory.populate explains when the pairs become resident. CapacityError if the system does not give the memory.
    """
    tensors = []
    sizes = [(num_blocks, block_size, heads, head_dim) for heads, head_dim, *_ in specs for _ in "kv"]
    lengths = [math.prod(size) for size in sizes]
    steps = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    size = max(sum(steps), 1) * dtype.itemsize
    try:
        memory = huge_pages(size)
    except OSError as error:
        raise CapacityError(
            f"{num_blocks} KV blocks of {block_size} tokens take {size / 1e9:.1f} GB, which the system does not give "
            f"({error.strerror}); lower num_kv_blocks or kv_cache_memory"
        ) from error
    pool, starts = torch.frombuffer(memory, dtype=dtype), [0, *itertools.accumulate(steps)][:-1]
    populate(memory, [start * dtype.itemsize for start in starts])  # blocks are used from the first on
    for shape, length, start in zip(sizes, lengths, starts, strict=True):
        tensors.append(pool[start : start + length].view(shape))
    return tuple(zip(tensors[::2], tensors[1::2], strict=True))


def allocate_on(
    device: torch.device, specs: Sequence[KVSpec], num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[KVLayer, ...]:
    """Allocate the pairs of allocate_layers on a GPU. The caller has checked that there is enough memory."""

    def zeros(heads: int, head_dim: int) -> Tensor:
        return torch.zeros(num_blocks, block_size, heads, head_dim, dtype=dtype, device=device)

    return tuple((zeros(heads, size), zeros(heads, size)) for heads, size, *_ in specs)


def kv_nbytes(layers: Sequence[KVLayer]) -> int:
    """Total bytes of the tensors of all layers."""
    return sum(tensor.nbytes for layer in layers for tensor in layer)
