"""spec_attention: append K/V rows to a paged cache, then multi-token-query attention over it.

The reference works on the whole ragged batch at once. It is written so that a row's bits depend only on its own query
and the cache rows it sees: KV is cut in tiles of fixed size from position 0, each tile is reduced alone, and the tiles
are added up in order. A tile past a row's end adds an exact zero, so longer neighbours do not matter.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.core import row_positions, row_requests
from trtspec.ops.dispatch import define
from trtspec.ops.linear import ROW_MULTIPLE

KV_TILE = 256
"""Tokens per KV tile of the reference; fixed, because the order of additions follows from it."""

_ARGUMENTS = (
    "Tensor cu_q_lens, Tensor kv_lens, Tensor block_tables, Tensor tree_mask, Tensor sinks, "
    "float scale, int window, float softcap"
)


def row_slots(block_tables: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat cache slot of (request, position) pairs; positions past a table's last column go to scratch block 0."""
    column = positions // block_size
    inside = column < block_tables.shape[1]
    block = block_tables[request, column.clamp(max=block_tables.shape[1] - 1)].long()
    return torch.where(inside, block, 0) * block_size + positions % block_size


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v


def _tree_allows(tree_mask: Tensor, key_row: Tensor) -> Tensor:
    """tree_mask [T, W] int32, key_row [T, S] (the key's index among its request's new rows) -> bit set, [T, S] bool."""
    word = (key_row.clamp(min=0) // 32).clamp(max=tree_mask.shape[1] - 1)
    bits = tree_mask.long().gather(1, word) >> (key_row.clamp(min=0) % 32)
    return (key_row < 0) | ((bits & 1) == 1)


def _reference_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    T, Hq, D = q.shape
    B, Hkv, block_size = kv_lens.shape[0], k_cache.shape[2], k_cache.shape[1]
    G = Hq // Hkv
    device = q.device

    request = row_requests(cu_q_lens, T)  # [T]
    positions = row_positions(cu_q_lens, kv_lens, T)  # [T]
    _append(k, v, k_cache, v_cache, row_slots(block_tables, request, positions, block_size))

    # Keys of each request, [B, S]: whole tiles, at least one; past a request's end they are masked.
    num_tiles = max(1, -(-int(kv_lens.max()) // KV_TILE))
    S = num_tiles * KV_TILE
    key_positions = torch.arange(S, device=device)
    slots = row_slots(block_tables, torch.arange(B, device=device)[:, None], key_positions[None, :], block_size)
    beyond = key_positions[None, :] >= kv_lens[:, None]  # [B, S]
    # 0 * NaN is NaN, so what lies past a request's end is cleared in V; scores there are replaced below.
    keys = k_cache.view(-1, Hkv, D)[slots].float()
    values = v_cache.view(-1, Hkv, D)[slots].float().masked_fill_(beyond[:, :, None, None], 0.0)
    keys = keys.view(B, num_tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 4, 2)  # [B, Hkv, tiles, D, tile]
    values = values.view(B, num_tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 2, 4)  # [B, Hkv, tiles, tile, D]

    # Queries padded to [B, Q]: a multiple of ROW_MULTIPLE rows per request.
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    Q = -(-int(q_lens.max()) // ROW_MULTIPLE) * ROW_MULTIPLE
    local = torch.arange(T, device=device) - cu_q_lens.long()[request]  # [T] row within its request
    queries = q.new_zeros(B, Q, Hq, D, dtype=torch.float32)
    queries[request, local] = q.float() * scale
    queries = queries.view(B, Q, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(B, Hkv, 1, G * Q, D)

    # Which keys a row sees, [B, Q, S]; padded query rows see position 0, so that nothing is NaN.
    row_position = positions.new_zeros(B, Q)
    row_position[request, local] = positions
    visible = key_positions <= row_position[:, :, None]
    if window > 0:
        visible &= key_positions > row_position[:, :, None] - window
    if tree_mask.numel():
        committed = (kv_lens - q_lens).long()[request]
        tree = _tree_allows(tree_mask, key_positions[None, :] - committed[:, None])  # [T, S]
        inside = (key_positions[None, :] < kv_lens.long()[request][:, None]) & tree
        if window > 0:
            inside &= key_positions > positions[:, None] - window
        visible[request, local] = inside
    visible = visible.view(B, 1, 1, Q, num_tiles, KV_TILE).permute(0, 1, 4, 2, 3, 5)  # [B, 1, tiles, 1, Q, tile]

    scores = torch.matmul(queries, keys)  # [B, Hkv, tiles, G*Q, tile]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(B, Hkv, num_tiles, G, Q, KV_TILE).masked_fill_(~visible, float("-inf"))
    top = scores.amax(-1).clamp(min=-1e30)  # [B, Hkv, tiles, G, Q]; a tile nobody sees stays finite
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    partial = torch.matmul(weights.view(B, Hkv, num_tiles, G * Q, KV_TILE), values).view(B, Hkv, num_tiles, G, Q, D)

    highest = top.amax(2)  # [B, Hkv, G, Q]
    if sinks.numel():
        sink = sinks.float().view(1, Hkv, G, 1)
        highest = torch.maximum(highest, sink)
    share = torch.exp(top - highest[:, :, None])  # [B, Hkv, tiles, G, Q]
    numerator, denominator = partial[:, :, 0] * share[:, :, 0, ..., None], total[:, :, 0] * share[:, :, 0]
    for tile in range(1, num_tiles):  # in order: additions must not depend on how many tiles follow
        numerator = numerator + partial[:, :, tile] * share[:, :, tile, ..., None]
        denominator = denominator + total[:, :, tile] * share[:, :, tile]
    if sinks.numel():
        denominator = denominator + torch.exp(sink - highest)
    out = (numerator / denominator[..., None]).permute(0, 3, 1, 2, 4).reshape(B, Q, Hq, D)
    return out[request, local].to(q.dtype)


def _fake_(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    return _reference_(q, k, v, k_cache, v_cache, *rest), k_cache, v_cache  # type: ignore[arg-type]


def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k_cache), torch.empty_like(v_cache)


_op_ = define(
    f"spec_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, {_ARGUMENTS}) -> Tensor",
    _reference_,
    _fake_,
)
_op = define(
    "spec_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _reference,
    _fake,
)


def spec_attention_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Append K/V of T packed rows of B requests, attend, return [T, Hq, D]; the caches are changed in place.

    q [T, Hq, D]; k, v [T, Hkv, D], same dtype as the caches [num_blocks, block_size, Hkv, D]; Hq % Hkv == 0.
    cu_q_lens [B+1] int32: request b owns rows cu_q_lens[b]..cu_q_lens[b+1]-1, which are the last of its
    kv_lens[b] (int32, counted after the append) tokens. block_tables [B, M] int32; block 0 is scratch.
    tree_mask [T, W] int32, or zero-size for causal: bit j of row t = may attend the request's new row j (itself
    included); committed keys are always seen. sinks [Hq] logits added to the denominator, or zero-size.
    window > 0: a row sees the last `window` positions, its own included. softcap > 0: c * tanh(score / c).
    """
    return cast(
        Tensor,
        _op_(q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, scale, window, softcap),
    )


def spec_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`spec_attention_` without side effects: returns (out, new k_cache, new v_cache). For ONNX and TensorRT graphs."""
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        _op(q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, scale, window, softcap),
    )
