"""Tiny random-weight checkpoints, written by transformers, and transformers as the oracle that reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_LLAMA_ROPE: dict[str, dict[str, Any]] = {
    # Original lengths small enough that scaling matters within 300 tokens; 16-wide heads have 8 wavelengths from 6 to
    # 20k tokens at theta 10000, so llama3 and yarn each keep some, blend some and stretch some.
    "llama31": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama_linear": {"rope_type": "linear", "factor": 2.5},
    "llama_yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama_dynamic": {"rope_type": "dynamic", "factor": 4.0},
}

ARCHS = ("llama", *_LLAMA_ROPE, "mistral_swa", "qwen2", "qwen3")


def tiny_config(arch: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The transformers config of `arch` (one of ARCHS); `overrides` are its fields."""
    fields: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64 if arch == "llama_dynamic" else 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if arch == "mistral_swa":
        kind: type[transformers.PretrainedConfig] = transformers.MistralConfig
        fields["sliding_window"] = 17
    elif arch in ("qwen2", "qwen3"):
        kind = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[arch]
    elif arch in ARCHS:
        kind = transformers.LlamaConfig
        if arch in _LLAMA_ROPE:
            fields["rope_parameters"] = {"rope_theta": 10_000.0, **_LLAMA_ROPE[arch]}
    else:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(ARCHS)}")
    return kind(**{**fields, **overrides})


def make_checkpoint(
    tmp_path: Path,
    arch: str,
    dtype: str = "float32",
    *,
    seed: int = 0,
    name: str | None = None,
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint folder `tmp_path / name` (default: arch) and returns it.

    Weights are wide enough for varied greedy output and narrow enough that transformers agrees with itself within
    3e-5 (one pass against token by token, fp32). Biases and norm weights are random, so that a forgotten one shows.
    `max_shard_size` (e.g. "50KB") splits the weights; `overrides` are fields of the transformers config.
    """
    config = tiny_config(arch, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.uniform_(0.5, 1.5)
                elif key.endswith(".bias"):
                    parameter.normal_(0.0, 0.5)
    folder = tmp_path / (name or arch)
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **sharding)
    return folder


def oracle(folder: Path) -> transformers.PreTrainedModel:
    """transformers' model of the folder, fp32, eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence in one pass, without a cache. Not for dynamic rope: see `oracle_decode`."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def oracle_decode(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] fed one token at a time, as decoding does; the cache knows the config's sliding windows."""
    cache = transformers.DynamicCache(config=model.config)
    rows = []
    with torch.no_grad():
        for token in tokens:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(rows)
