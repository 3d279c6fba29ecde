"""The architectures that can be read, and the names of their tensors in a Hugging Face checkpoint."""

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
"""Divisors of the frequencies of Llama 3's rope. This tensor is no weight of the model."""


@dataclass(frozen=True)
class Architecture:
    """An architecture that can be read.

    model_type, hf_class: Hugging Face's names.
    interleaved: rope in llama.cpp rotates neighbouring elements of queries and keys, where Hugging Face rotates the
    halves of a head. Their rows are therefore in another order.
    biases: q, k and v have biases, whatever config.json says.
    """

    model_type: str
    hf_class: str
    interleaved: bool = False
    biases: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}
"""Architecture by general.architecture."""


def hf_name(name: str) -> str | None:
    """Hugging Face name of a tensor; None for a tensor that no such model has."""
    found = _OF_A_LAYER.fullmatch(name)
    if found is None:
        return _OUTER.get(name)
    layer, part, kind = found.groups()
    return f"model.layers.{layer}.{_INNER[part]}.{kind}" if part in _INNER else None


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are one matrix here, and so must be of one kind."""


KEPT_BITS = {"Q4_0": 4, "Q8_0": 8}
"""Bits of the kinds whose integers are kept: symmetric ones with an fp16 scale for every 32 inputs."""


def kept_linears(file: GgufFile) -> dict[str, int]:
    """Map the Hugging Face name of each linear whose integers are kept as they are to the number of bits of these."""
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
    """Number of heads in a tensor's rows, if rope rotates them; else None.

    The tensor is one of an interleaved architecture.
    """
    found = _OF_A_LAYER.fullmatch(name)
    return None if found is None else {"attn_q": heads, "attn_k": kv_heads}.get(found[2])
