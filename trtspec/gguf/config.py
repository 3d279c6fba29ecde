"""config.json and generation_config.json of the model in a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trtspec.gguf.metadata import MetadataReader
from trtspec.gguf.names import ROPE_FACTORS, hf_name, kept_linears
from trtspec.gguf.tokenizer import ending_ids

_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Entries of the tokens that end a text, a turn, a message."""
_DTYPES = {"F32": "float32", "F16": "float16"}


def hf_config(metadata: MetadataReader) -> dict[str, Any]:
    """config.json of the model.

    `dtype` is the best one to compute the model in: that of its embedding if it is not quantised, else bfloat16. Raises
    CheckpointError. Raises UnsupportedError for features of such models that are not supported.
    """
    tensors = metadata.file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.error(
            "general.architecture", f"= {metadata.prefix!r} fits no file without token_embd.weight [V, H]"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.has(key):
            raise metadata.unsupported(f"{metadata.prefix}.{key}", "such models are not supported")
    known, hidden = metadata.architecture, metadata.positive("embedding_length")
    head_dim = metadata.positive("attention.key_length", max(hidden // metadata.heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.positive(key, head_dim) != head_dim:
            raise metadata.unsupported(f"{metadata.prefix}.{key}", f"only {head_dim}, the size of a head, is supported")
    config: dict[str, Any] = {
        "architectures": [known.hf_class],
        "model_type": known.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.positive("feed_forward_length"),
        "num_hidden_layers": metadata.positive("block_count"),
        "num_attention_heads": metadata.heads,
        "num_key_value_heads": metadata.kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.positive("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": known.biases or "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": _DTYPES.get(embedding.kind.name, "bfloat16"),
        "eos_token_id": _ends(metadata, embedding.shape[0]),
        "bos_token_id": metadata.optional_id("tokenizer.ggml.bos_token_id", embedding.shape[0]),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, head_dim),
    }
    return {key: value for key, value in config.items() if value is not None} | _quantization(metadata)


def hf_generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json that belongs to a config.json."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}


def _quantization(metadata: MetadataReader) -> dict[str, Any]:
    """quantization_config of the linears whose integers are kept, in compressed-tensors' terms; empty without any."""
    kept = kept_linears(metadata.file)
    if not kept:
        return {}
    every = {
        name.removesuffix(".weight")
        for one in metadata.file.tensors
        if (name := hf_name(one)) and one.startswith("blk.")
    }
    others = sorted(name for name in every - kept.keys() if name.endswith("_proj"))
    targets = {bits: [name for name in kept if kept[name] == bits] for bits in sorted(set(kept.values()))}
    groups = {
        f"group_{i}": {
            "targets": names if len(targets) > 1 else ["Linear"],
            "weights": {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
        for i, (bits, names) in enumerate(targets.items())
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head", *others],
        }
    }


def _ends(metadata: MetadataReader, size: int) -> list[int] | None:
    found = [metadata.optional_id(key, size) for key in _ENDS]
    return list(dict.fromkeys(token for token in (*found, *ending_ids(metadata, size)) if token is not None)) or None


def _rope_scaling(metadata: MetadataReader, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in metadata.file.tensors:
        return _llama3(metadata, head_dim)
    kind = metadata.text(f"{metadata.prefix}.rope.scaling.type", "linear")
    if kind == "none":
        return None
    if kind == "linear":  # files of 2023 have the factor alone, under one name or the other
        key = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if metadata.has(key)), "")
        if not key or metadata.get(f"{metadata.prefix}.{key}", (int, float), "a number") in (0, 1):  # there is none
            return None
        return {"rope_type": "linear", "factor": metadata.number(key)}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if metadata.number(f"rope.scaling.{key}", 1.0) != 1:
                raise metadata.unsupported(f"{metadata.prefix}.rope.scaling.{key}", "only 1 is supported")
        multiplier = f"{metadata.prefix}.rope.scaling.yarn_log_multiplier"
        if metadata.get(multiplier, (int, float), "a number", 0.0):
            raise metadata.unsupported(multiplier, "only 0 is supported")
        return {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.positive("rope.scaling.original_context_length"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise metadata.unsupported(f"{metadata.prefix}.rope.scaling.type", "supported: none, linear, yarn")


def _llama3(metadata: MetadataReader, head_dim: int) -> dict[str, Any]:
    """Rope settings whose factors equal those in the file, which does not name the settings.

    low_freq_factor and high_freq_factor are 1 and 4 in all existing models.
    """
    entry = metadata.file.tensors[ROPE_FACTORS]
    given = np.ones(1)
    if entry.kind.name == "F32":
        given = np.frombuffer(metadata.file.data(entry).tobytes(), "<f4").astype(np.float64)
    low, high, factor = 1.0, 4.0, float(given.max())
    if given.size == head_dim // 2 and float(given.min()) >= 1 and factor > 1:
        theta = metadata.number("rope.freq_base", 10_000.0)
        waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = (1 / given - 1 / factor) / (1 - 1 / factor)
        between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
        lengths = (smooth * (high - low) + low) * waves  # exact for these, a bound for the others
        length = round(float(np.median(lengths[between]) if between.any() else lengths[smooth > 0.5].max()))
        expected = ((length / waves - low) / (high - low)).clip(0, 1)
        if np.allclose(1 / ((1 - expected) / factor + expected), given, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise metadata.unsupported(
        f"{metadata.prefix}.rope.freq_base", f"its {ROPE_FACTORS} are not those of a llama3 rope scaling"
    )
