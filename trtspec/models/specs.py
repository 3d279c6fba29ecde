"""The architectures that can run: one row each, which turns a `ModelConfig` into a `DecoderSpec`.

A new row here adds a dense decoder. All rows share what they do not state: pre-norm residual blocks, RMSNorm, rotary
positions, gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtspec.config.checkpoint.model import ModelConfig, RopeConfig
from trtspec.core import KVSpec
from trtspec.errors import UnsupportedError


@dataclass(frozen=True)
class DecoderSpec:
    """A description of one dense decoder: shapes and switches.

    Sizes are in elements; `windows[i]` is in tokens, None = full attention.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """KV shape of each layer."""
        return tuple(KVSpec(self.num_kv_heads, self.head_dim, window) for window in self.windows)

    @property
    def kv_elements_per_token(self) -> int:
        """Number of K and V elements of one token in all layers."""
        return sum(layer.elements_per_token for layer in self.kv_layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the decoder; a tied head counts once."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        layer = h * (q + 2 * kv) + q * h + 3 * h * self.intermediate_size + 2 * h
        layer += (q + 2 * kv) * self.qkv_bias + h * self.o_bias + 2 * d * self.qk_norm
        layer += (2 * self.intermediate_size + h) * self.mlp_bias
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + h + heads * self.vocab_size * h


@dataclass(frozen=True)
class ArchitectureRow:
    """A set of values that an architecture fixes by its name; None = the checkpoint's own config gives the value.

    mtp_prefix: prefix of the tensor names of its MTP modules; module i's names begin with it and "i.". These tensors
    are in its checkpoints, but no part of the decoder.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    mtp_prefix: str | None = None


ARCHITECTURES: dict[str, ArchitectureRow] = {
    "LlamaForCausalLM": ArchitectureRow(),
    "MistralForCausalLM": ArchitectureRow(qkv_bias=False, o_bias=False, mlp_bias=False),
    "Qwen2ForCausalLM": ArchitectureRow(qkv_bias=True, o_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": ArchitectureRow(mlp_bias=False, qk_norm=True),
    "MiMoForCausalLM": ArchitectureRow(qkv_bias=True, o_bias=False, mlp_bias=False, mtp_prefix="model.mtp_layers."),
}


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Spec of a checkpoint. UnsupportedError names the architecture and the supported ones."""
    return dense_spec(config, require_architecture(config.architecture, config.path))


def mtp_prefix(name: str, folder: Path) -> str:
    """Prefix of the tensor names of an architecture's MTP modules. UnsupportedError if the architecture has none."""
    prefix = require_architecture(name, folder).mtp_prefix
    if prefix is None:
        having = ", ".join(name for name, row in ARCHITECTURES.items() if row.mtp_prefix is not None)
        raise UnsupportedError(f"architecture {name!r} in {folder} has no MTP layers; those of {having} run")
    return prefix


def require_architecture(name: str, folder: Path) -> ArchitectureRow:
    """Row of the architecture `name` of the checkpoint in `folder`. UnsupportedError if there is no such row."""
    row = ARCHITECTURES.get(name)
    if row is None:
        raise UnsupportedError(
            f"architecture {name!r} in {folder} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return row


def dense_spec(config: ModelConfig, row: ArchitectureRow | None = None) -> DecoderSpec:
    """Combine the config's shapes with the values that the row fixes."""
    row = row or ArchitectureRow()
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        max_position_embeddings=config.max_position_embeddings,
        windows=config.windows,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=config.attention_bias if row.qkv_bias is None else row.qkv_bias,
        o_bias=config.attention_bias if row.o_bias is None else row.o_bias,
        mlp_bias=config.mlp_bias if row.mlp_bias is None else row.mlp_bias,
        qk_norm=row.qk_norm,
    )
