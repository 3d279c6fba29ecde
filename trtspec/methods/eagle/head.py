"""EAGLE heads (Li et al., "EAGLE: Speculative sampling requires rethinking feature uncertainty", arXiv 2401.15077).

The vector for position p is at first the target's last hidden state, which its lm_head reads. Later it is the head's
own guess of that state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend
from trtspec.models.decoder import DecoderLayer, run_layers
from trtspec.models.layers import Linear, RotaryTable, _unloaded, weight_bytes
from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class EagleSpec:
    """Shapes and switches of an EAGLE head.

    decoder: describes the head's layers; its width and vocabulary are the target's. own_embedding, own_head: False =
    the head uses the target's.
    """

    decoder: DecoderSpec
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False


class EagleHead(DraftHead):
    """A head of fc([e ; h]) and decoder layers, all of which run in every pass.

    The first layer has no norm before its attention, and there is no norm after the last layer. The output stands for a
    hidden state, and goes to the lm_head as it is.

    first_layer: the index under which its first attention asks for KV. Where the checkpoint has no embedding or lm_head
    of its own, `share` puts the target's in their place.
    """

    def __init__(self, spec: EagleSpec, first_layer: int = 0, max_position: int | None = None) -> None:
        decoder = spec.decoder
        super().__init__(decoder.vocab_size, kv_layers=decoder.kv_layers)
        self.spec = spec
        H, V = decoder.hidden_size, decoder.vocab_size
        self.fc = Linear(2 * H, H, bias=spec.fc_bias)
        self.rotary = RotaryTable(decoder.rope, decoder.head_dim, max_position or decoder.max_position_embeddings)
        self.layers = nn.ModuleList(
            DecoderLayer(decoder, first_layer + i, input_norm=i > 0) for i in range(decoder.num_layers)
        )
        self.embedding: nn.Module = nn.Identity()  # share() fills in what the checkpoint leaves out
        self.head: nn.Module = nn.Identity()
        if spec.own_embedding:
            self.embedding = nn.Embedding(V, H, _weight=_unloaded(V, H))
        if spec.own_head:
            self.head = Linear(H, V, bias=False, float_out=True)

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding and lm_head where the checkpoint has none of its own."""
        if not self.spec.own_embedding:
            self.embedding = embedding
        if not self.spec.own_head:
            self.head = head

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run fc and all layers, with the arguments of DraftHead; y is the last layer's output."""
        x = self.fc(torch.cat((self.embedding(input_ids), h), dim=-1))  # [T, H]
        cos, sin = self.rotary(positions, x.dtype)
        return run_layers(self.layers, x, cos, sin, attend, rows)[-1]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the lm_head's logits for y."""
        return self.head(y)  # type: ignore[no-any-return]

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that num_passes passes read: fc, the layers and the lm_head in each."""
        return num_passes * weight_bytes(self.fc, self.layers, self.head)
