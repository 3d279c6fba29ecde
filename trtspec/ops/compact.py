"""kv_compact: move the accepted path of a draft tree to consecutive cache rows."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.attention import row_slots
from trtspec.ops.dispatch import define


def _reference_(k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor) -> None:
    B, L = path.shape
    request = torch.arange(B, device=path.device)[:, None]
    real = path >= 0
    start = starts.long()[:, None]
    source = row_slots(block_tables, request, start + path.clamp(min=0), k_cache.shape[1])
    target = row_slots(block_tables, request, start + torch.arange(L, device=path.device), k_cache.shape[1])
    target = torch.where(real, target, 0)  # padding goes to scratch
    for cache in (k_cache, v_cache):
        rows = cache.view(-1, *cache.shape[2:])
        rows[target] = rows[source]  # a gather, then a scatter: source and target may overlap


def _fake_(*_: object) -> None:
    return None


def _reference(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor
) -> tuple[Tensor, Tensor]:
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    _reference_(k_cache, v_cache, block_tables, starts, path)
    return k_cache, v_cache


def _fake(k_cache: Tensor, v_cache: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(k_cache), torch.empty_like(v_cache)


_op_ = define(
    "kv_compact_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_tables, Tensor starts, Tensor path) -> ()",
    _reference_,
    _fake_,
)
_op = define(
    "kv_compact(Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor starts, Tensor path) -> (Tensor, Tensor)",
    _reference,
    _fake,
)


def kv_compact_(k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor) -> None:
    """Move row starts[b] + path[b, i] to row starts[b] + i, for every request b and i < L, in place.

    Caches are [num_blocks, block_size, Hkv, D].
    block_tables: [B, M] int32.
    starts [B] int32: first row of the step in each sequence.
    path [B, L] int64: accepted tree rows in order, padded with -1.
    """
    _op_(k_cache, v_cache, block_tables, starts, path)


def kv_compact(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new (k_cache, v_cache): `kv_compact_` without side effects."""
    return cast("tuple[Tensor, Tensor]", _op(k_cache, v_cache, block_tables, starts, path))
