"""DFlash drafts (Chen et al., "DFlash: block diffusion for flash speculative decoding"; z-lab/dflash dflash/model.py,
vllm/model_executor/models/qwen3_dflash.py): layers shaped like Qwen3's over a block of the next token and masks, which
see the text before it through keys and values alone, and these are made of the target's states.

Of each position p of the text, with the states s_p of the target after the layers that config.json names:

    c_p = hidden_norm(fc(s_p));  in layer l  K_p = rope_p(k_norm(Wk c_p)), V_p = Wv c_p,  no input_layernorm

Of the block, rows j = 0 .. K at the positions P + j, P the position of the next token n, ids [n, mask x K]:

    x = embedding(id), the target's;  in layer l  q, k, v of input_layernorm(x) with the same weights, then attention
    over K, V of all positions before P and of *all* rows of the block, residual, MLP, residual, as in Qwen3
    logits = lm_head(norm(x)), the target's or one over fewer ids;  row j guesses the token at its own position,
    j = 1 .. K
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend
from trtspec.models.decoder import DecoderLayer
from trtspec.models.layers import Linear, RMSNorm, RotaryTable, weight_bytes
from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class DFlashSpec:
    """`decoder` describes its layers; its width and vocabulary are the target's. num_captured: states that fc reads.
    draft_vocab_size: ids that it drafts. own_head: an lm_head over those, False = the target's serves."""

    decoder: DecoderSpec
    num_captured: int
    draft_vocab_size: int
    own_head: bool = False


class DFlashHead(DraftHead):
    """`first_layer` is the index under which its first attention asks for KV. `share` gives it what it has not: an
    embedding and an lm_head."""

    def __init__(self, spec: DFlashSpec, first_layer: int = 0, max_position: int | None = None) -> None:
        decoder = spec.decoder
        super().__init__(decoder.vocab_size, spec.draft_vocab_size, decoder.kv_layers)
        self.spec = spec
        self.first_layer = first_layer
        H, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.fc = Linear(spec.num_captured * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, eps)
        self.rotary = RotaryTable(decoder.rope, decoder.head_dim, max_position or decoder.max_position_embeddings)
        self.layers = nn.ModuleList(DecoderLayer(decoder, first_layer + i) for i in range(decoder.num_layers))
        self.norm = RMSNorm(H, eps)
        self.embedding: nn.Module = nn.Identity()
        self.head: nn.Module = nn.Identity()
        if spec.own_head:
            self.head = Linear(H, spec.draft_vocab_size, bias=False, float_out=True)

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding, and its lm_head unless there is one."""
        self.embedding, self.head = embedding, self.head if self.spec.own_head else head

    def fuse(self, captured: Tensor) -> Tensor:
        """See DraftHead: c [T, H]."""
        return self.hidden_norm(self.fc(captured))  # type: ignore[no-any-return]

    def read_in(self, c: Tensor, positions: Tensor, attend: Attend) -> None:
        """KV of the text, c [T, H] at positions [T]. What the rows would attend to is computed and not looked at: the
        op that appends is the one that attends."""
        cos, sin = self.rotary(positions, c.dtype)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            attend(layer.attention.layer, *layer.attention.heads(c, cos, sin))

    def forward(self, input_ids: Tensor, h: Tensor, positions: Tensor, attend: Attend, step: int = 0) -> Tensor:
        """The rows of blocks: input_ids [n] the token *of* each, positions [n] -> y [n, H]. h is not read. That the
        rows of a block see each other is for `attend` to arrange."""
        x = self.embedding(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x  # type: ignore[no-any-return]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """See DraftHead."""
        return self.head(self.norm(y))  # type: ignore[no-any-return]

    def weight_bytes_for(self, num_passes: int) -> int:
        """See DraftHead; `read_in` reads what makes heads of the text, and each pass reads it again."""
        attentions = [cast(DecoderLayer, layer).attention for layer in self.layers]
        text = [part for one in attentions for part in (one.qkv, one.q_norm, one.k_norm)]
        passes = num_passes * weight_bytes(self.layers, self.norm, self.head)
        return weight_bytes(self.fc, self.hidden_norm, *text) + passes
