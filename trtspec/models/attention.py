"""One attention layer, and the callable that gives it its keys and values.

A decoder does not know where its KV lives: it calls `attend(layer, q, k, v)`. `PagedAttend` is that callable for the
paged cache; it is built inside the step's graph from the tensors that are the step's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from trtspec.core import AttnMetadata, KVLayer
from trtspec.models.layers import Linear, RMSNorm, rotate
from trtspec.models.specs import DecoderSpec
from trtspec.ops import spec_attention, spec_attention_
from trtspec.ops.attention import row_slots

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]."""


@dataclass(frozen=True)
class PagedAttend:
    """Attention over the paged cache: `kv[layer]` = (k_cache, v_cache), appended in place.

    groups: KV group of each layer (kv/groups.py), empty = they are one. scale, of scores: 1 / sqrt(D) if not given.
    """

    attn: AttnMetadata
    kv: Sequence[KVLayer]
    windows: Sequence[int | None]
    groups: Sequence[int] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return spec_attention_(q, k, v, *self.kv[layer], **self._rest(layer, q, scale))

    def query(self, layer: int, q: Tensor, scale: float | None = None) -> Tensor:
        """Queries alone, q [T, Hq, D] of rows whose K and V this launch has written in `layer` -> [T, Hq, D]. The cache
        stays as it is, bit for bit: the op appends rows, so it is handed those that are there."""
        request, positions = self.attn.requests(q.shape[0]), self.attn.positions(q.shape[0])  # [T]
        slots = row_slots(self.tables(layer), request, positions, self.block_size(layer))  # [T]
        return self(layer, q, *self.read(layer, slots), scale)

    def tables(self, layer: int) -> Tensor:
        """[B, M] int32, the block tables of a layer."""
        return self.attn.tables_of(self.groups[layer] if self.groups else 0)

    def at(self, attn: AttnMetadata) -> Self:
        """The same cache for other rows."""
        return replace(self, attn=attn)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, Hkv, D] into slots [T] of the layer (ops.attention.row_slots), for what is no attention's."""
        for cache, rows in zip(self.kv[layer], (k, v), strict=True):
            cache.index_put_(self._places(layer, slots), rows)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What `write` put there: k, v [T, Hkv, D]."""
        places = self._places(layer, slots)
        k_cache, v_cache = self.kv[layer]
        return k_cache[places], v_cache[places]

    def block_size(self, layer: int) -> int:
        """Tokens of a block."""
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
        }


class FunctionalAttend(PagedAttend):
    """The same without changing a tensor: `kv`, a list, gets the new caches in place of the old."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        assert isinstance(self.kv, list)
        out, k_cache, v_cache = spec_attention(q, k, v, *self.kv[layer], **self._rest(layer, q, scale))
        self.kv[layer] = (k_cache, v_cache)
        return out

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See PagedAttend."""
        assert isinstance(self.kv, list)
        k_cache, v_cache = self.kv[layer]
        places = self._places(layer, slots)
        self.kv[layer] = (k_cache.index_put(places, k), v_cache.index_put(places, v))


class Attention(nn.Module):
    """q, k, v of x [T, H] from one fused matrix, optional q/k norms per head, rotary positions, attend, output.

    `in_features`: width of x where it is not H (an EAGLE3 layer reads two vectors side by side).
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

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> q [T, Hq, D], k, v [T, Hkv, D], ready to attend."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = torch.split(qkv, self.sizes, dim=1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.o(attend(self.layer, *self.heads(x, cos, sin)).flatten(1))  # type: ignore[no-any-return]
