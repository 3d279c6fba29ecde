"""GGUF files of tiny checkpoints, written with the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] = MappingProxyType({}),
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a Llama, Qwen2 or Qwen3 folder as a GGUF file.

    kind: that of the matrices. kinds: other kinds, by name of the matrix. The package does not write K quants; their
    blocks are random.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    if tokenizer is not None:
        tokenizer(writer)
    if extra is not None:
        extra(writer)
    random = np.random.default_rng(0)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, heads if ".q_proj." in name else kv_heads)
        for theirs, short in _NAMES.items():
            name = name.replace(theirs, short)
        wanted = Kind[kinds.get(name, kind) if values.ndim > 1 else "F32"]
        writer.add_tensor(name, _quantised(values, wanted, random), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def interleaved(values: Any, heads: int) -> Any:
    """Rows of queries and keys in the order in which llama.cpp's converter writes them."""
    return np.ascontiguousarray(
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Any:
    """Factors that llama.cpp's converter writes for such a rope scaling, by transformers' own function."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    class Config:
        rope_parameters = rope
        hidden_size, num_attention_heads = head_dim, 1

        def standardize_rope_params(self) -> None:
            pass

    Config.head_dim = head_dim  # type: ignore[attr-defined]
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](Config(), torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / inverse).numpy()


def _quantised(values: Any, kind: Kind, random: np.random.Generator) -> Any:
    if kind in (Kind.F32, Kind.F16):
        return gguf.quantize(values, kind)
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)  # instead of one that may be infinite
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for place in places:
        blocks[..., place : place + 2] = scale
    return blocks.reshape(*values.shape[:-1], -1)
