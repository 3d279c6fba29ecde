"""One attention layer, and the `attend` callable that gives it keys and values.

A decoder does not know where its KV is stored: it calls `attend(layer, q, k, v)`. `PagedAttend` is that callable for
the paged cache. The step's graph builds it from the tensors that are the step's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from trtspec.core import AttnMetadata, KVLayer
from trtspec.models.layers import GatedMLP, Linear, RMSNorm
from trtspec.models.specs import DecoderSpec
from trtspec.ops import kv_compact, kv_compact_, rotate_heads, rotate_heads_inline, spec_attention, spec_attention_
from trtspec.ops.attention import row_slots

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]."""


@dataclass(frozen=True)
class PagedAttend:
    """An `Attend` over the paged cache: `kv[layer]` = (k_cache, v_cache), to which new rows are appended in place.

    groups: KV group of each layer (kv/groups.py); empty = all layers are in one group.
    scale, in calls: factor of the scores; 1 / sqrt(D) if it is not given.
    """

    attn: AttnMetadata
    kv: Sequence[KVLayer]
    windows: Sequence[int | None]
    groups: Sequence[int] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return spec_attention_(q, k, v, *self.kv[layer], **self._rest(layer, q, scale))

    def query(self, layer: int, q: Tensor, scale: float | None = None) -> Tensor:
        """Attend with queries alone, q [T, Hq, D] -> [T, Hq, D].

        The rows are those whose K and V this launch has written in `layer`. The cache stays as it is, bit for bit: the
        op appends rows, so it gets the rows that are in the cache already.
        """
        request, positions = self.attn.requests(q.shape[0]), self.attn.positions(q.shape[0])  # [T]
        slots = row_slots(self.tables(layer), request, positions, self.block_size(layer))  # [T]
        return self(layer, q, *self.read(layer, slots), scale)

    def tables(self, layer: int) -> Tensor:
        """Block tables of a layer, [B, M] int32."""
        return self.attn.tables_of(self.groups[layer] if self.groups else 0)

    def at(self, attn: AttnMetadata) -> Self:
        """Return the same cache for the rows of `attn`."""
        return replace(self, attn=attn)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] to slots [T] of the layer (ops.attention.row_slots).

        This is for values that are not the KV of an attention.
        """
        for cache, rows in zip(self.kv[layer], (k, v), strict=True):
            cache.index_put_(self._places(layer, slots), rows)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `write` stored in these slots: k, v [T, Hkv, D]."""
        places = self._places(layer, slots)
        k_cache, v_cache = self.kv[layer]
        return k_cache[places], v_cache[places]

    def compact(self, layer: int, starts: Tensor, path: Tensor) -> None:
        """Move the KV rows of accepted paths into line: row starts[b] + path[b, i] to starts[b] + i.

        starts: [B] int32. path: [B, L] int64, -1 past the path.
        """
        kv_compact_(*self.kv[layer], self.tables(layer), starts, path)

    def block_size(self, layer: int) -> int:
        """Tokens of a KV block."""
        return self.kv[layer][0].shape[1]

    def _places(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        size = self.block_size(layer)
        return slots // size, slots % size

    def _rest(self, layer: int, q: Tensor, scale: float | None) -> dict[str, Any]:
        attn = self.attn
        return {
            "cu_q_lens": attn.cu_q_lens,
            "kv_lens": attn.kv_lens,
            "block_tables": self.tables(layer),
            "tree_mask": attn.tree_mask,
            "sinks": q.new_empty(0),
            "scale": q.shape[-1] ** -0.5 if scale is None else scale,
            "window": self.windows[layer] or 0,
            "tree_base": attn.tree_base,
            "ancestors": attn.ancestors,
        }


class FunctionalAttend(PagedAttend):
    """A `PagedAttend` that changes no tensor: it replaces the entries of `kv`, a list, by new caches."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        assert isinstance(self.kv, list)
        out, k_cache, v_cache = spec_attention(q, k, v, *self.kv[layer], **self._rest(layer, q, scale))
        self.kv[layer] = (k_cache, v_cache)
        return out

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write as `PagedAttend.write` does, but to new caches that replace those in `kv`."""
        assert isinstance(self.kv, list)
        k_cache, v_cache = self.kv[layer]
        places = self._places(layer, slots)
        self.kv[layer] = (k_cache.index_put(places, k), v_cache.index_put(places, v))

    def compact(self, layer: int, starts: Tensor, path: Tensor) -> None:
        """Move rows as `PagedAttend.compact` does, but to new caches that replace those in `kv`."""
        assert isinstance(self.kv, list)
        k_cache, v_cache = self.kv[layer]
        self.kv[layer] = kv_compact(k_cache, v_cache, self.tables(layer), starts, path)


class Attention(nn.Module):
    """An attention layer on x [T, H].

    It has one fused matrix for q, k, v, optional q/k norms per head, rotary positions, and an output matrix.
    in_features: width of x where it is not H (an EAGLE3 layer reads two vectors next to each other).
    """

    def __init__(self, spec: DecoderSpec, layer: int, in_features: int | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.qkv = Linear(in_features or spec.hidden_size, sum(self.sizes) * spec.head_dim, spec.qkv_bias)
        self.o = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.is_op = False  # as in RMSNorm

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q [T, Hq, D] and k, v [T, Hkv, D] of x [T, H], ready to attend."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = torch.split(qkv, self.sizes, dim=1)
        return *(rotate_heads if self.is_op else rotate_heads_inline)(self.q_norm(q), self.k_norm(k), cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Attend with all T rows; return the output [T, H], or that of `rows` [R] alone, [R, H]."""
        attended = attend(self.layer, *self.heads(x, cos, sin)).flatten(1)  # [T, Hq * D]
        return self.o(attended if rows is None else attended[rows])  # type: ignore[no-any-return]


def as_ops(model: nn.Module) -> None:
    """Make all norms, gated MLPs and attention layers of a model call an op for what is neither linear nor attention.

    Each is then one kernel, instead of one for each of torch's operations.
    """
    for module in model.modules():
        if isinstance(module, (RMSNorm, GatedMLP, Attention)):
            module.is_op = True
