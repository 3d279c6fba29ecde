"""spec_attention: append K/V rows to a paged cache, then multi-token-query attention over it.

The reference works on the whole ragged batch at once. A row's bits depend only on its own query and the cache rows that
it sees. For this, KV is cut in tiles of fixed size from position 0, each tile is reduced alone, and the tiles are added
up in order. A tile past a row's end adds an exact zero, so longer neighbours do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.core import row_positions, row_requests
from trtspec.ops.dispatch import define
from trtspec.ops.products import DEPTH_MULTIPLE, ROW_MULTIPLE, products

KV_TILE = 256
"""Number of tokens of a KV tile of the reference. It is fixed, because the order of additions follows from it."""

_ARGUMENTS = (
    "Tensor cu_q_lens, Tensor kv_lens, Tensor block_tables, Tensor tree_mask, Tensor sinks, "
    "float scale, int window, float softcap, Tensor? tree_base=None, Tensor? ancestors=None"
)


def row_slots(block_tables: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat cache slot of (request, position) pairs. Positions that no column covers go to scratch block 0."""
    column = positions // block_size
    inside = (column >= 0) & (column < block_tables.shape[1])
    block = block_tables[request, column.clamp(0, block_tables.shape[1] - 1)].long()
    return torch.where(inside, block, 0) * block_size + positions % block_size


@dataclass(frozen=True)
class _Group:
    """A group of b parts with similar numbers of rows, padded to one width Q; S keys, in whole tiles.

    A part is rows that find their keys at the same places: those of a request, or a single node of a draft tree.
    """

    rows: Tensor  # [t] int64, packed rows of these parts
    member: Tensor  # [t] int64, index of the row's part in the group
    local: Tensor  # [t] int64, index of the row within its part
    width: int  # Q
    slots: Tensor  # [b, S] int64, cache slot of each key
    beyond: Tensor  # [b, S] bool, keys past their part's end
    hidden: Tensor  # [b, Q, S] bool, keys that a row does not see; padding rows see key 0, to avoid NaN


@dataclass(frozen=True)
class _Plan:
    """A plan that follows from a step's metadata alone, the same in every layer."""

    slots: Tensor  # [T] int64, cache slots of the new rows
    groups: list[_Group]


_Metadata = tuple[Tensor, ...]  # cu_q_lens, kv_lens, block_tables, tree_mask, and with trees: tree_base, ancestors
_recent: list[tuple[_Metadata, tuple[int, ...], _Plan]] = []


def _plan(metadata: _Metadata, num_rows: int, block_size: int, window: int) -> _Plan:
    """Plan for the metadata of a step; one of the last two plans if its tensors are the same.

    Layers ask one after the other with the same tensors, and two plans are kept since windows may alternate. The plans'
    tensors are kept as well, so that `is` cannot take a new tensor for one of them. torch's version counter shows
    in-place changes, but not writes that bypass torch (through numpy, say).
    """
    fresh = not any(tensor.is_inference() for tensor in metadata)  # inference tensors have no version counter
    key = (num_rows, block_size, window, *(tensor._version for tensor in metadata if fresh))
    for known, known_key, plan in _recent:
        if fresh and known_key == key and all(a is b for a, b in zip(known, metadata, strict=True)):
            return plan
    plan = _make_plan(metadata, num_rows, block_size, window)
    _recent[:] = [(metadata, key, plan), *_recent[:1]]
    return plan


def _make_plan(metadata: _Metadata, num_rows: int, block_size: int, window: int) -> _Plan:
    cu_q_lens, kv_lens, block_tables, tree_mask = metadata[:4]
    request = row_requests(cu_q_lens, num_rows)  # [T]
    place = row_positions(cu_q_lens, kv_lens, request)  # [T] row of the sequence
    if len(metadata) == 4:
        parts = _Parts(cu_q_lens.long(), torch.arange(len(kv_lens), device=kv_lens.device), kv_lens.long())
        position, key_rows = place, None
    else:
        parts, position, key_rows = _tree_parts(request, place, *metadata[4:])
    part = row_requests(parts.starts, num_rows)  # [T]
    local = torch.arange(num_rows, device=cu_q_lens.device) - parts.starts[part]  # [T]
    # Parts with similar numbers of rows form a group, so that a long prompt does not pad generation requests.
    widths = _row_widths(parts.starts)  # [P]
    groups = []
    for width in sorted(set(widths.tolist())):
        members = (widths == width).nonzero()[:, 0]  # [b] parts
        rows = (widths[part] == width).nonzero()[:, 0]  # [t]
        member = torch.searchsorted(members, part[rows])  # [t]
        ends = parts.ends[members]
        keys = torch.arange(max(1, -(-int(ends.max()) // KV_TILE)) * KV_TILE, device=ends.device)  # [S]
        tree = tree_mask[rows] if tree_mask.numel() else None
        seen = _seen(keys, position[rows], local[rows], ends[member], window, tree)
        hidden = (keys != 0).expand(len(members), width, len(keys)).clone()
        hidden[member, local[rows]] = ~seen
        where = keys[None, :] if key_rows is None else key_rows(members, keys)
        slots = row_slots(block_tables, parts.owners[members][:, None], where, block_size)
        groups.append(_Group(rows, member, local[rows], width, slots, keys >= ends[:, None], hidden))
    return _Plan(row_slots(block_tables, request, place, block_size), groups)


@dataclass(frozen=True)
class _Parts:
    """The P parts of a step (see _Group)."""

    starts: Tensor  # [P+1] int64, first packed row of each, and T
    owners: Tensor  # [P] int64, requests
    ends: Tensor  # [P] int64, number of positions that some row of the part may see


def _tree_parts(
    request: Tensor, place: Tensor, tree_base: Tensor, ancestors: Tensor
) -> tuple[_Parts, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Parts of a step with trees, the position [T] of each row, and where keys are.

    The function gives the rows of the sequence [b, S] that hold the keys [S] of b parts. Each node of a tree is a part.
    """
    depth = (ancestors >= 0).sum(1)  # [T] 0 = not in a tree
    base = tree_base.long()[request]  # [T]
    position = torch.where(depth > 0, base + depth - 1, place)
    begins = torch.ones_like(request, dtype=torch.bool)
    begins[1:] = (depth[1:] > 0) | (depth[:-1] > 0) | (request[1:] != request[:-1])
    first = begins.nonzero()[:, 0]  # [P] first row of each part
    starts = F.pad(first, (0, 1), value=len(request))

    def key_rows(parts: Tensor, keys: Tensor) -> Tensor:
        rows = first[parts]
        index = keys - base[rows][:, None]  # [b, S] entry of `ancestors`
        inside = (index >= 0) & (index < depth[rows][:, None])
        entries = ancestors.long()[rows].gather(1, index.clamp(0, ancestors.shape[1] - 1))
        return torch.where(inside, base[rows][:, None] + entries, keys)

    return _Parts(starts, request[first], position[starts[1:] - 1] + 1), position, key_rows


def _row_widths(starts: Tensor) -> Tensor:
    """Number of rows of each part rounded up to ROW_MULTIPLE * 2^n, [P] int64."""
    fours = -(-(starts[1:] - starts[:-1]) // ROW_MULTIPLE)
    return ROW_MULTIPLE * 2 ** torch.ceil(torch.log2(fours.double())).long()


def _seen(keys: Tensor, position: Tensor, local: Tensor, ends: Tensor, window: int, tree_mask: Tensor | None) -> Tensor:
    """Keys [S] that each row sees, [t, S] bool. position, local and ends (of the row's part) are [t]."""
    seen = keys <= position[:, None]
    if tree_mask is not None:
        # Bit j of a row's mask is the request's new row j. Keys before the new rows are committed and always seen.
        index = keys - (position - local)[:, None]  # [t, S] new row of each key, negative if committed
        word = (index.clamp(min=0) // 32).clamp(max=tree_mask.shape[1] - 1)
        allowed = (tree_mask.long().gather(1, word) >> (index.clamp(min=0) % 32)) & 1 == 1
        seen = (keys < ends[:, None]) & ((index < 0) | allowed)
    if window > 0:
        seen &= keys > position[:, None] - window
    return seen


def _reference_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int, softcap: float, tree_base: Tensor | None = None, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    metadata: _Metadata = (cu_q_lens, kv_lens, block_tables, tree_mask)
    if ancestors is not None and ancestors.numel():
        if tree_base is None:
            raise ValueError("spec_attention has ancestors and no tree_base; give both")
        if tree_mask.numel():
            raise ValueError("spec_attention has tree_mask and ancestors; give one of them")
        metadata = (*metadata, tree_base, ancestors)
    plan = _plan(metadata, q.shape[0], k_cache.shape[1], window)
    k_cache.view(-1, *k_cache.shape[2:])[plan.slots] = k
    v_cache.view(-1, *v_cache.shape[2:])[plan.slots] = v
    out = torch.empty_like(q)
    for group in plan.groups:
        padded = q.new_zeros(group.slots.shape[0], group.width, *q.shape[1:], dtype=torch.float32)
        padded[group.member, group.local] = q[group.rows].float() * scale
        attended = _attend(padded, k_cache, v_cache, group, sinks, softcap)
        out[group.rows] = attended[group.member, group.local].to(q.dtype)
    return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Group, sinks: Tensor, softcap: float) -> Tensor:
    """Attend with scaled queries [b, Q, Hq, D] fp32 to the cached keys of their requests: [b, Q, Hq, D] fp32."""
    b, Q, Hq, D = q.shape
    Hkv, S = k_cache.shape[2], group.slots.shape[1]
    G, tiles = Hq // Hkv, S // KV_TILE
    missing = -D % DEPTH_MULTIPLE  # head elements; 0 for common models
    slots = group.slots.flatten()  # index_select copies whole rows, several times faster than [slots] does
    keys = k_cache.view(-1, Hkv, D).index_select(0, slots).view(b, S, Hkv, D).float()
    values = v_cache.view(-1, Hkv, D).index_select(0, slots).view(b, S, Hkv, D).float()
    # 0 * NaN is NaN, so V is cleared past a request's end. Scores there are replaced below.
    values.masked_fill_(group.beyond[:, :, None, None], 0.0)
    if missing:
        q, keys, values = F.pad(q, (0, missing)), F.pad(keys, (0, missing)), F.pad(values, (0, missing))
        D += missing
    keys = keys.view(b, tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 2, 4)  # [b, Hkv, tiles, tile, D]
    values = values.view(b, tiles, KV_TILE, Hkv, D).permute(0, 3, 1, 2, 4)  # [b, Hkv, tiles, tile, D]
    queries = q.view(b, Q, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(b, Hkv, 1, G * Q, D)
    hidden = group.hidden.view(b, 1, 1, Q, tiles, KV_TILE).permute(0, 1, 4, 2, 3, 5)  # [b, 1, tiles, 1, Q, tile]

    scores = products(queries, keys)  # [b, Hkv, tiles, G*Q, tile]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(b, Hkv, tiles, G, Q, KV_TILE).masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1).clamp(min=-1e30)  # [b, Hkv, tiles, G, Q]; finite also for a tile that no row sees
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    weights = weights.view(b, Hkv, tiles, G * Q, KV_TILE)
    partial = products(weights, values.mT).view(b, Hkv, tiles, G, Q, D)
    if not partial.isfinite().all():  # values of a later row, perhaps a rejected draft, must not reach this one
        broken = ~values.isfinite().all(-1, keepdim=True)  # [b, Hkv, tiles, tile, 1]
        partial = products(weights, values.masked_fill(broken, 0.0).mT).view(b, Hkv, tiles, G, Q, D)
        sees_broken = (~hidden & broken[:, :, :, None].mT).any(-1, keepdim=True)  # [b, Hkv, tiles, 1, Q, 1]
        partial = partial.masked_fill(sees_broken, float("nan"))

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
    out = numerator / denominator[..., None]  # [b, Hkv, G, Q, D]
    return out.permute(0, 3, 1, 2, 4).reshape(b, Q, Hq, D)[..., : D - missing]


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
    tree_base: Tensor | None = None, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append K/V of T packed rows of B requests, attend, and return [T, Hq, D]. The caches are changed in place.

    q: [T, Hq, D]; Hq % Hkv == 0.
    k, v: [T, Hkv, D], of the dtype of the caches [num_blocks, block_size, Hkv, D].
    cu_q_lens [B+1] int32: request b owns rows cu_q_lens[b]..cu_q_lens[b+1]-1. They are the last of its tokens.
    kv_lens [B] int32: number of tokens of each request, counted after the append.
    block_tables: [B, M] int32; block 0 is scratch.
    tree_mask [T, W] int32, or zero-size for causal: bit j of row t = it may attend the request's new row j (itself
    included). Committed keys are always seen.
    sinks: [Hq] logits that are added to the denominator, or zero-size.
    window > 0: a row sees the last `window` positions, its own included.
    softcap > 0: scores become c * tanh(score / c).
    tree_base [B] int32, ancestors [T, D] int32: draft trees; None or zero-size = chains. tree_base is the first row of
    the sequence that belongs to the tree. Entry i of a row's ancestors is the row, counted from tree_base, whose token
    has position tree_base + i before the row's own. The last entry >= 0 is the row itself, and -1 follows. So the row's
    position is tree_base + its number of entries - 1, and it sees all rows before tree_base and its ancestors. A row
    without entries is causal. K and V of every row go to the row's own place. A node has the bits of the same token in
    a chain. tree_mask must be zero-size then, else ValueError (RuntimeError in the C++ kernels).
    """
    return cast(
        Tensor,
        _op_(
            q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, scale, window, softcap,
            tree_base, ancestors,
        ),
    )  # fmt: skip


def spec_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0,
    tree_base: Tensor | None = None, ancestors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, new k_cache, new v_cache): `spec_attention_` without side effects, for ONNX and TensorRT graphs."""
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        _op(
            q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, tree_mask, sinks, scale, window, softcap,
            tree_base, ancestors,
        ),
    )  # fmt: skip
