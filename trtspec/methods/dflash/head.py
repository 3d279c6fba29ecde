"""The DFlash draft head: layers of Qwen3's shape over a block of the next token and masks.

The block sees the text before it only through keys and values, which are computed from the target's states. References:
Chen et al., "DFlash: block diffusion for flash speculative decoding"; z-lab/dflash dflash/model.py;
vllm/model_executor/models/qwen3_dflash.py.

For each position p of the text, s_p are the target's states after the layers that config.json names:

    c_p = hidden_norm(fc(s_p));  in layer l  K_p = rope_p(k_norm(Wk c_p)), V_p = Wv c_p,  no input_layernorm

The block has the ids [n, mask x K]; n is the next token and P its position. Rows j = 0 .. K are at positions P + j:

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
from trtspec.models.decoder import DecoderLayer, run_layers
from trtspec.models.layers import Linear, RMSNorm, RotaryTable, weight_bytes
from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class DFlashSpec:
    """The shape of a DFlash head.

    decoder: its layers; their width and vocabulary are the target's. num_captured: number of states that fc reads.
    draft_vocab_size: number of ids that the head drafts. own_head: whether it has an lm_head over those; False = it
    uses the target's.
    """

    decoder: DecoderSpec
    num_captured: int
    draft_vocab_size: int
    own_head: bool = False


class DFlashHead(DraftHead):
    """The draft layers of DFlash.

    first_layer: index under which the first attention layer asks for KV. `share` provides what the head lacks: an
    embedding and an lm_head.
    """

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
        """Use the target's embedding, and its lm_head unless the head has its own."""
        self.embedding, self.head = embedding, self.head if self.spec.own_head else head

    def fuse(self, captured: Tensor) -> Tensor:
        """Return c [T, H], the fused states of captured [T, n * Ht]."""
        return self.hidden_norm(self.fc(captured))  # type: ignore[no-any-return]

    def read_in(self, c: Tensor, positions: Tensor, attend: Attend) -> None:
        """Append KV of the text to the cache: c [T, H] at positions [T].

        The attention output of these rows is computed but not used, because the op that appends also attends.
        """
        cos, sin = self.rotary(positions, c.dtype)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            attend(layer.attention.layer, *layer.attention.heads(c, cos, sin))

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return y [n, H] of the rows of blocks; input_ids [n] is the token *of* each row, positions [n].

        rows: as in DraftHead. h is not read. `attend` must let the rows of a block see each other.
        """
        x = self.embedding(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        return run_layers(self.layers, x, cos, sin, attend, rows)[-1]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Logits [R, Vd] fp32 of y [R, H]; the last norm is applied first."""
        return self.head(self.norm(y))  # type: ignore[no-any-return]

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the first `num_passes` passes read, together with `read_in`.

        `read_in` reads the weights that compute q, k and v of the text, and each pass reads these again.
        """
        attentions = [cast(DecoderLayer, layer).attention for layer in self.layers]
        text = [part for one in attentions for part in (one.qkv, one.q_norm, one.k_norm)]
        passes = num_passes * weight_bytes(self.layers, self.norm, self.head)
        return weight_bytes(self.fc, self.hidden_norm, *text) + passes
