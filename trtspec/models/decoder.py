"""The one decoder module. A `DecoderSpec` makes every dense architecture from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from trtspec.models.attention import Attend, Attention
from trtspec.models.layers import GatedMLP, Linear, PackedEmbedding, RMSNorm, RotaryTable, _unloaded, weight_bytes
from trtspec.models.specs import DecoderSpec


class DecoderLayer(nn.Module):
    """A decoder layer on [T, H]: x + attention(norm(x)), then x + mlp(norm(x)).

    input_norm: False = attention reads x itself.
    """

    def __init__(self, spec: DecoderSpec, layer: int, input_norm: bool = True) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if input_norm else nn.Identity()
        self.attention = Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Append KV of all T rows; return the output [T, H], or that of `rows` [R] alone, [R, H]."""
        attended = self.attention(self.attention_norm(x), cos, sin, attend, rows)
        x = (x if rows is None else x[rows]) + attended
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
) -> list[Tensor]:
    """Run decoder layers on x [T, H]; return the output of each.

    rows: [R], the rows whose last output is read; None = all. The last layer's output projection and MLP leave the
    others out, as later layers alone would read them.
    """
    streams: list[Tensor] = []
    *before, last = layers
    for layer in before:
        x = layer(x, cos, sin, attend)
        streams.append(x)
    return [*streams, last(x, cos, sin, attend, rows)]


class Decoder(nn.Module):
    """A decoder: token ids to hidden states to logits. Every tensor of a step is an argument; calls keep no state.

    max_position: tokens of the rotary table; `spec.max_position_embeddings` if it is not given.
    """

    def __init__(self, spec: DecoderSpec, max_position: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embedding: nn.Embedding | PackedEmbedding = nn.Embedding(
            spec.vocab_size, spec.hidden_size, _weight=_unloaded(spec.vocab_size, spec.hidden_size)
        )
        self.rotary = RotaryTable(spec.rope, spec.head_dim, max_position or spec.max_position_embeddings)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False, float_out=True)
        if spec.tie_word_embeddings:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, H] after the last norm, from input_ids [T] and positions in the sequence [T] int64.

        rows: [R], the rows to return, [R, H]; None = all.
        """
        return self.capture(input_ids, positions, attend, (), rows)[0]

    def capture(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        layers: Sequence[int],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward` returns, and the residual stream of all rows after each of `layers`.

        The streams lie next to each other in one tensor [T, len(layers) * H]. Layer -1 stands for the hidden states
        after the last norm.
        """
        x = self.embedding(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        whole = any(layer in (-1, len(self.layers) - 1) for layer in layers)  # all rows of the last layer are read
        streams = run_layers(self.layers, x, cos, sin, attend, None if whole else rows)
        streams.append(self.norm(streams[-1]))
        captured = torch.cat([streams[i] for i in layers], dim=-1) if layers else x[:, :0]
        return streams[-1][rows] if whole and rows is not None else streams[-1], captured

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one step reads: all but the embedding rows that it does not look up."""
        untied = self.head.weight is not self.embedding.weight
        skipped = self.embedding.weight.nbytes if untied else 0
        return weight_bytes(self) - skipped

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] fp32 of hidden states [R, H]."""
        return self.head(hidden)  # type: ignore[no-any-return]
