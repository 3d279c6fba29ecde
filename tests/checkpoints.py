"""Tiny random-weight checkpoints, written by transformers, and transformers as the oracle that reads them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_LLAMA_ROPE: dict[str, dict[str, Any]] = {
    # Original lengths are small enough that scaling matters within 300 tokens. Heads of width 16 have 8 wavelengths
    # from 6 to 20k tokens at theta 10000. So llama3 and yarn each keep some, blend some and stretch some.
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
    """The transformers config of `arch` (one of ARCHS, or mimo, which is Qwen2's). overrides: its fields."""
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
    elif arch in ("qwen2", "qwen3", "mimo"):
        kind = transformers.Qwen3Config if arch == "qwen3" else transformers.Qwen2Config
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
    """Write a checkpoint folder `tmp_path / name` (default: arch) and return it.

    Weights are wide enough for varied greedy output. They are narrow enough that transformers agrees with itself within
    3e-5 (one pass against token by token, fp32). Biases and norm weights are random, so that a forgotten one shows.

    max_shard_size: splits the weights (e.g. "50KB"). overrides: fields of the transformers config. "mimo" is the target
    of make_mimo.
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
    if arch == "mimo":
        _turn_into_mimo(folder, getattr(torch, dtype), seed)
    return folder


def make_mimo(tmp_path: Path, num_modules: int = 1, **options: Any) -> Path:
    """Write a MiMo target with `num_modules` MTP modules of random weights, in the public layout.

    options: those of make_checkpoint.
    """
    return make_checkpoint(tmp_path, "mimo", num_nextn_predict_layers=num_modules, **options)


def _turn_into_mimo(folder: Path, dtype: torch.dtype, seed: int) -> None:
    """Turn Qwen2's checkpoint into MiMo's, whose config.json does not list layer types."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config.pop("layer_types")
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, norms = config["hidden_size"], ("token", "hidden", "final")

    def add_modules(tensors: dict[str, torch.Tensor]) -> None:
        like = {key: tensor.shape for key, tensor in tensors.items() if key.startswith("model.layers.0.")}
        for i in range(config.get("num_nextn_predict_layers", 1)):
            shapes = {key.removeprefix("model.layers.0."): shape for key, shape in like.items()}
            shapes |= {f"{name}_layernorm.weight": torch.Size([hidden]) for name in norms}
            shapes["input_proj.weight"] = torch.Size([hidden, 2 * hidden])
            for key, shape in shapes.items():
                random = torch.randn(shape, generator=generator)
                scaled = random * (2 * shape[1]) ** -0.5 if len(shape) == 2 else random / 4 + ("norm" in key)
                tensors[f"model.mtp_layers.{i}.{key}"] = scaled.to(dtype)

    edit_tensors(folder, add_modules)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a checkpoint's tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a checkpoint's config.json in place."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def oracle(folder: Path) -> transformers.PreTrainedModel:
    """transformers' model of the folder, fp32, eager attention; MiMo's without MTP is Qwen2's."""
    config = json.loads((folder / "config.json").read_text())
    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if config["model_type"] == "mimo":
        kind = transformers.Qwen2ForCausalLM
        options["config"] = transformers.Qwen2Config.from_dict({**config, "model_type": "qwen2"})
    model = kind.from_pretrained(folder, **options)
    return model.eval().requires_grad_(False)


def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence in one pass, without a cache. Dynamic rope needs `oracle_decode` instead."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def oracle_decode(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of tokens fed one at a time, as in decoding; the cache has the config's sliding windows."""
    cache = transformers.DynamicCache(config=model.config)
    rows = []
    with torch.no_grad():
        for token in tokens:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(rows)
