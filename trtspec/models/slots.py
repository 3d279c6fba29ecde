"""Map of a checkpoint's tensors to rows of our parameters: q, k, v and gate, up are one matrix each here."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class Slot:
    """A destination of a checkpoint tensor: rows [start, start + size) of the named parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def weight_slots(spec: DecoderSpec) -> dict[str, Slot]:
    """Map each Hugging Face tensor name to its slot, for every tensor that a checkpoint of this spec must hold."""
    H = spec.hidden_size
    slots = {
        "model.embed_tokens.weight": Slot("embedding.weight", 0, (spec.vocab_size, H)),
        "model.norm.weight": Slot("norm.weight", 0, (H,)),
    }
    if not spec.tie_word_embeddings:
        slots["lm_head.weight"] = Slot("head.weight", 0, (spec.vocab_size, H))
    for layer in range(spec.num_layers):
        slots |= layer_slots(spec, f"model.layers.{layer}.", f"layers.{layer}.", H)
    return slots


def layer_slots(spec: DecoderSpec, theirs: str, ours: str, in_features: int) -> dict[str, Slot]:
    """Slots of one decoder layer.

    theirs, ours: prefixes of the layer's names in the checkpoint and in the module.
    in_features: width of the input of q, k, v.
    """
    H, I, D = spec.hidden_size, spec.intermediate_size, spec.head_dim  # noqa: E741
    q, kv = spec.num_heads * D, spec.num_kv_heads * D
    # (checkpoint name, parameter, first row, rows, columns, has bias)
    linears = (
        ("self_attn.q_proj", "attention.qkv", 0, q, in_features, spec.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", q, kv, in_features, spec.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", q + kv, kv, in_features, spec.qkv_bias),
        ("self_attn.o_proj", "attention.o", 0, H, q, spec.o_bias),
        ("mlp.gate_proj", "mlp.gate_up", 0, I, H, spec.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", I, I, H, spec.mlp_bias),
        ("mlp.down_proj", "mlp.down", 0, H, I, spec.mlp_bias),
    )
    norms = [("input_layernorm", "attention_norm", H), ("post_attention_layernorm", "mlp_norm", H)]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", "attention.q_norm", D), ("self_attn.k_norm", "attention.k_norm", D)]
    slots = {}
    for name, parameter, start, rows, columns, has_bias in linears:
        slots[f"{theirs}{name}.weight"] = Slot(f"{ours}{parameter}.weight", start, (rows, columns))
        if has_bias:
            slots[f"{theirs}{name}.bias"] = Slot(f"{ours}{parameter}.bias", start, (rows,))
    for name, parameter, size in norms:
        slots[f"{theirs}{name}.weight"] = Slot(f"{ours}{parameter}.weight", 0, (size,))
    return slots
