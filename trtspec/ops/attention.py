"""spec_attention: append K/V rows to a paged cache, then multi-token-query attention over it.

The reference works on the whole ragged batch at once. It is written so that a row's bits depend only on its own query
and the cache rows it sees: KV is cut in tiles of fixed size from position 0, each tile is reduced alone, and the tiles
are added up in order. A tile past a row's end adds an exact zero, so longer neighbours do not matter.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
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


def _reference_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    T = q.shape[0]
    request = row_requests(cu_q_lens, T)  # [T]
    position = row_positions(cu_q_lens, kv_lens, T)  # [T]
    local = torch.arange(T, device=q.device) - cu_q_lens.long()[request]  # [T] row within its request

    slots = row_slots(block_tables, request, position, k_cache.shape[1])
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v

    # Requests with about as many rows go together, so that a long prompt does not pad its generating neighbours.
    widths = _row_widths(cu_q_lens)  # [B]
    out = torch.empty_like(q)
    for width in sorted(set(widths.tolist())):
        members = (widths == width).nonzero()[:, 0]  # [b] requests
        rows = (widths[request] == width).nonzero()[:, 0]  # [t] their rows
        member = torch.searchsorted(members, request[rows])  # [t] index into members
        padded = q.new_zeros(len(members), width, *q.shape[1:], dtype=torch.float32)
        padded[member, local[rows]] = q[rows].float() * scale
        visible = _visible(
            kv_lens[members],
            position[rows],
            member,
            local[rows],
            width,
            window,
            tree_mask[rows] if tree_mask.numel() else None,
        )
        attended = _attend(padded, k_cache, v_cache, kv_lens[members], block_tables[members], visible, sinks, softcap)
        out[rows] = attended[member, local[rows]].to(q.dtype)
    return out


def _row_widths(cu_q_lens: Tensor) -> Tensor:
    """Rows of each request rounded up to ROW_MULTIPLE * 2^n, [B] int64."""
    fours = -(-(cu_q_lens[1:] - cu_q_lens[:-1]) // ROW_MULTIPLE)
    return ROW_MULTIPLE * 2 ** torch.ceil(torch.log2(fours.double())).long()


def _num_keys(kv_lens: Tensor) -> int:
    """Keys of the longest request in whole tiles."""
    return max(1, -(-int(kv_lens.max()) // KV_TILE)) * KV_TILE


def _visible(
    kv_lens: Tensor, position: Tensor, member: Tensor, local: Tensor, width: int, window: int, tree_mask: Tensor | None
) -> Tensor:
    """Which keys each padded row sees, [b, width, S] bool. Rows that are padding see key 0, so that nothing is NaN."""
    b, S = kv_lens.shape[0], _num_keys(kv_lens)
    keys = torch.arange(S, device=position.device)
    seen = keys <= position[:, None]  # [t, S]
    if tree_mask is not None:
        # Bit j of a row's mask is the request's new row j; what is before those is committed and always seen.
        index = keys - (position - local)[:, None]  # [t, S] new row of each key, negative if committed
        word = (index.clamp(min=0) // 32).clamp(max=tree_mask.shape[1] - 1)
        allowed = (tree_mask.long().gather(1, word) >> (index.clamp(min=0) % 32)) & 1 == 1
        seen = (keys < kv_lens[member][:, None]) & ((index < 0) | allowed)
    if window > 0:
        seen &= keys > position[:, None] - window
    visible = (keys == 0).expand(b, width, S).clone()
    visible[member, local] = seen
    return visible


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    visible: Tensor,
    sinks: Tensor,
    softcap: float,
) -> Tensor:
    """Scaled queries [b, Q, Hq, D] fp32 against their requests' cached keys: [b, Q, Hq, D] fp32."""
    b, Q, Hq, D = q.shape
    Hkv, S = k_cache.shape[2], visible.shape[2]
    G, tiles = Hq // Hkv, S // KV_TILE
    key = torch.arange(S, device=q.device)
    slots = row_slots(block_tables, torch.arange(b, device=q.device)[:, None], key[None, :], k_cache.shape[1])
    keys = k_cache.view(-1, Hkv, D)[slots].float()  # [b, S, Hkv, D]
    values = v_cache.view(-1, Hkv, D)[slots].float()
    # 0 * NaN is NaN, so what lies past a request's end is cleared in V; scores there are replaced below.
    values.masked_fill_((key >= kv_lens[:, None])[:, :, None, None], 0.0)
    keys = keys.view(b, tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 4, 2)  # [b, Hkv, tiles, D, tile]
    values = values.view(b, tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 2, 4)  # [b, Hkv, tiles, tile, D]
    queries = q.view(b, Q, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(b, Hkv, 1, G * Q, D)
    visible = visible.view(b, 1, 1, Q, tiles, KV_TILE).permute(0, 1, 4, 2, 3, 5)  # [b, 1, tiles, 1, Q, tile]

    scores = torch.matmul(queries, keys)  # [b, Hkv, tiles, G*Q, tile]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(b, Hkv, tiles, G, Q, KV_TILE).masked_fill_(~visible, float("-inf"))
    top = scores.amax(-1).clamp(min=-1e30)  # [b, Hkv, tiles, G, Q]; a tile nobody sees stays finite
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    partial = torch.matmul(weights.view(b, Hkv, tiles, G * Q, KV_TILE), values).view(b, Hkv, tiles, G, Q, D)

    highest = top.amax(2)  # [b, Hkv, G, Q]
    sink = sinks.float().view(1, Hkv, G, 1) if sinks.numel() else None
    if sink is not None:
        highest = torch.maximum(highest, sink)
    share = torch.exp(top - highest[:, :, None])  # [b, Hkv, tiles, G, Q]
    numerator, denominator = partial[:, :, 0] * share[:, :, 0, ..., None], total[:, :, 0] * share[:, :, 0]
    for tile in range(1, tiles):  # in order: additions must not depend on how many tiles follow
        numerator = numerator + partial[:, :, tile] * share[:, :, tile, ..., None]
        denominator = denominator + total[:, :, tile] * share[:, :, tile]
    if sink is not None:
        denominator = denominator + torch.exp(sink - highest)
    return (numerator / denominator[..., None]).permute(0, 3, 1, 2, 4).reshape(b, Q, Hq, D)


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
