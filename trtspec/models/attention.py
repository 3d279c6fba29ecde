"""One attention layer, and the callable that gives it its keys and values.

A decoder does not know where its KV lives: it calls `attend(layer, q, k, v)`. `PagedAttend` is that callable for the
paged cache; it is built inside the step's graph from the tensors that are the step's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.core import AttnMetadata, KVLayer
from trtspec.models.layers import Linear, RMSNorm, rotate
from trtspec.models.specs import DecoderSpec
from trtspec.ops import spec_attention_

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]."""


@dataclass(frozen=True)
class PagedAttend:
    """Attention over the paged cache: `kv[layer]` = (k_cache, v_cache), appended in place."""

    attn: AttnMetadata
    kv: Sequence[KVLayer]
    windows: Sequence[int | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.kv[layer]
        attn = self.attn
        return spec_attention_(
            q, k, v, k_cache, v_cache,
            attn.cu_q_lens, attn.kv_lens, attn.block_tables, attn.tree_mask, attn.tree_mask.new_empty(0),
            scale=q.shape[-1] ** -0.5, window=self.windows[layer] or 0,
        )  # fmt: skip


class Attention(nn.Module):
    """q, k, v of x [T, H] from one fused matrix, optional q/k norms per head, rotary positions, attend, output."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.qkv = Linear(spec.hidden_size, sum(self.sizes) * spec.head_dim, spec.qkv_bias)
        self.o = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = torch.split(qkv, self.sizes, dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o(attend(self.layer, q, k, v).flatten(1))  # type: ignore[no-any-return]
