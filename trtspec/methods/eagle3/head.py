"""EAGLE3 heads and P-EAGLE heads.

EAGLE3 (Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time test", arXiv
2503.01840): the vector for position p is at first the target's captured hidden states, fused by `fc`. Later it is the
head's own output there.

P-EAGLE heads draft in parallel (methods/parallel/worker.py): no pass reads their output. They may have further layers,
which are plain layers of width H on the residual stream alone. They have a `mask_hidden` for rows that have no states
of the target:

    f = fc(states, or mask_hidden); x = layer 0 of (embedding(id), f), as in EAGLE3; x = layer i(x); lm_head(norm(x))

(vllm/model_executor/models/llama_eagle3.py, vllm-project/speculators models/peagle.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend, Attention
from trtspec.models.decoder import DecoderLayer, run_layers
from trtspec.models.layers import GatedMLP, Linear, RMSNorm, RotaryTable, _unloaded, weight_bytes
from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class Eagle3Spec:
    """Shapes and options of an EAGLE3 head.

    layer: spec of its layers (P-EAGLE has several), with the target's vocabulary. num_captured: number of hidden states
    that the head fuses. norm_before_fc, fc_norm, norm_output: as in Eagle3HeadConfig. own_embedding, own_head: False =
    the head uses the target's. parallel: the head is a P-EAGLE head.
    """

    layer: DecoderSpec
    target_hidden_size: int
    num_captured: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    parallel: bool = False


class Eagle3Layer(nn.Module):
    """A decoder layer over [norm(e); norm(h)]; the residual stream is h, before or after its norm."""

    def __init__(self, spec: Eagle3Spec, layer: int) -> None:
        super().__init__()
        H, eps = spec.layer.hidden_size, spec.layer.rms_norm_eps
        self.norm_before_residual = spec.norm_before_residual
        self.attention_norm = RMSNorm(H, eps)  # norm of e
        self.hidden_norm = RMSNorm(H, eps)
        self.attention = Attention(spec.layer, layer, in_features=2 * H)
        self.mlp_norm = RMSNorm(H, eps)
        self.mlp = GatedMLP(spec.layer)

    def forward(
        self, e: Tensor, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Append KV of all T rows; return the output [T, H], or that of `rows` [R] alone, [R, H]."""
        normed = self.hidden_norm(h)
        x = normed if self.norm_before_residual else h
        attended = self.attention(torch.cat((self.attention_norm(e), normed), dim=-1), cos, sin, attend, rows)
        x = (x if rows is None else x[rows]) + attended
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Eagle3Head(DraftHead):
    """An EAGLE3 or P-EAGLE head, all layers of which run in every pass.

    layer: the index under which its first attention asks for KV; the target's layers come first. Where the checkpoint
    has no embedding or lm_head of its own, `share` puts the target's in their place.
    """

    def __init__(self, spec: Eagle3Spec, layer: int = 0, max_position: int | None = None) -> None:
        super().__init__(spec.layer.vocab_size, spec.draft_vocab_size, spec.layer.kv_layers)
        self.spec = spec
        H, V, eps = spec.layer.hidden_size, spec.draft_vocab_size, spec.layer.rms_norm_eps
        self.fc = Linear(spec.num_captured * spec.target_hidden_size, H, bias=False)
        self.rotary = RotaryTable(
            spec.layer.rope, spec.layer.head_dim, max_position or spec.layer.max_position_embeddings
        )
        self.midlayer = Eagle3Layer(spec, layer)
        self.layers = nn.ModuleList(DecoderLayer(spec.layer, layer + i) for i in range(1, spec.layer.num_layers))
        if spec.parallel:
            self.mask_hidden = _unloaded(spec.num_captured * spec.target_hidden_size)
        self.norm = RMSNorm(H, eps)
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, eps)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, eps) for _ in range(spec.num_captured))
        shape = (spec.layer.vocab_size, H)
        self.embedding: nn.Module = nn.Identity()  # share() fills in what the checkpoint leaves out
        self.head: nn.Module = nn.Identity()
        if spec.own_embedding:
            self.embedding = nn.Embedding(*shape, _weight=_unloaded(*shape))
        if spec.own_head:
            self.head = Linear(H, V, bias=False, float_out=True)

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding and lm_head where the checkpoint has none of its own."""
        if not self.spec.own_embedding:
            self.embedding = embedding
        if not self.spec.own_head:
            self.head = head

    def fuse(self, captured: Tensor) -> Tensor:
        """Return fc of the captured states, normed if the spec says so: [T, n * Ht] -> [T, H]; n = num_captured."""
        if self.spec.norm_before_fc:
            captured = self.input_norm(captured)
        if self.spec.fc_norm:
            states = torch.split(captured, self.spec.target_hidden_size, dim=-1)
            captured = torch.cat([norm(one) for norm, one in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(captured)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run all layers, with the arguments of DraftHead.

        y is the last layer's output, before the last norm unless norm_output.
        """
        e = self.embedding(input_ids)
        cos, sin = self.rotary(positions, e.dtype)
        x: Tensor = self.midlayer(e, h, cos, sin, attend, None if self.layers else rows)
        if self.layers:
            x = run_layers(self.layers, x, cos, sin, attend, rows)[-1]
        return self.norm(x) if self.spec.norm_output else x

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the lm_head's logits for y, normed first unless norm_output."""
        return self.head(y if self.spec.norm_output else self.norm(y))  # type: ignore[no-any-return]

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that num_passes passes read: fc once; the layers, norm and lm_head in each."""
        return weight_bytes(self.fc) + num_passes * weight_bytes(self.midlayer, self.layers, self.norm, self.head)
