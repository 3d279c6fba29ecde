"""Export of a trained decoder as a Hugging Face folder that transformers, vLLM and trtspec load unchanged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtspec.models.decoder import Decoder
from trtspec.models.specs import DecoderSpec
from trtspec.models.weights import hf_tensors
from trtspec.train.data import END_OF_TEXT, end_of_text_id, load_tokenizer


def llama_config(spec: DecoderSpec, end_of_text: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a LlamaForCausalLM; `end_of_text` is both BOS and EOS."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export(decoder: Decoder, tokenizer_file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, generation config, weights (as `dtype`) and tokenizer to `folder`, replacing older files.

    Every file is written next to the folder and then renamed into it. A reader sees an old or a new file, never half a
    file.
    """
    tokenizer = load_tokenizer(tokenizer_file)
    end = end_of_text_id(tokenizer)
    spec = decoder.spec
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in hf_tensors(decoder).items()}
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    _write_json(staging / "config.json", llama_config(spec, end, dtype))
    _write_json(staging / "generation_config.json", {"bos_token_id": end, "eos_token_id": end, "do_sample": False})
    _write_json(
        staging / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "model_max_length": spec.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
        },
    )
    shutil.copyfile(tokenizer_file, staging / "tokenizer.json")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(staging.iterdir()):
        file.chmod(0o644)  # save_file makes its file private
        os.replace(file, folder / file.name)
    staging.rmdir()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
