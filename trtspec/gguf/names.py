"""Which architectures are read, and what their tensors are called in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtspec.gguf.file import GgufFile

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_A_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by, of Llama 3's rope; no weight of the model."""


@dataclass(frozen=True)
class Architecture:
    """model_type and class: Hugging Face's words. interleaved: llama.cpp turns neighbouring elements of queries and
    keys, where Hugging Face turns the halves of a head, so their rows are in another order. biases: of q, k and v,
    whatever config.json says."""

    model_type: str
    hf_class: str
    interleaved: bool = False
    biases: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}
"""By general.architecture."""


def hf_name(name: str) -> str | None:
    """Of a tensor; None for one that no such model has."""
    found = _OF_A_LAYER.fullmatch(name)
    if found is None:
        return _OUTER.get(name)
    layer, part, kind = found.groups()
    return f"model.layers.{layer}.{_INNER[part]}.{kind}" if part in _INNER else None


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are one matrix here: they are of one kind."""


KEPT_BITS = {"Q4_0": 4, "Q8_0": 8}
"""Bits of the kinds whose integers are kept: symmetric ones with an fp16 scale for 32 inputs."""


def kept_linears(file: GgufFile) -> dict[str, int]:
    """Hugging Face's names of the linears whose integers are kept as they are, and of how many bits these are."""
    kinds = {
        name.removesuffix(".weight"): entry.kind.name
        for gguf_name, entry in file.tensors.items()
        if (name := hf_name(gguf_name)) is not None and gguf_name.startswith("blk.") and len(entry.shape) == 2
    }
    found = {}
    for name, kind in kinds.items():
        block, _, own = name.rpartition(".")
        others = next((names for names in _FUSED if own in names), ())
        if kind in KEPT_BITS and all(kinds.get(f"{block}.{other}") == kind for other in others):
            found[name] = KEPT_BITS[kind]
    return found


def turned_heads(name: str, heads: int, kv_heads: int) -> int | None:
    """How many heads a tensor of an interleaved architecture has in its rows, where rope turns them; else None."""
    found = _OF_A_LAYER.fullmatch(name)
    return None if found is None else {"attn_q": heads, "attn_k": kv_heads}.get(found[2])
