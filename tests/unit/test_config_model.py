"""ModelConfig against the configs of well-known checkpoints, and against transformers' reading of the same files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trtspec.config.checkpoint.model import ModelConfig, RopeConfig
from trtspec.errors import CheckpointError, UnsupportedError

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(folder: Path, config: dict[str, Any] | str, generation: dict[str, Any] | str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in (("config.json", config), ("generation_config.json", generation)):
        if data is not None:
            (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, config, generation))


def test_llama31(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128010],
    }
    config = read(tmp_path, LLAMA31_8B, generation)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (128, 32, 8)
    assert config.rope == RopeConfig("llama3", 500000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert config.windows == (None,) * 32
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == {128001, 128008, 128009, 128010}
    assert config.bos_token_id == 128000
    assert config.pad_token_id is None
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert config.max_seq_len == 131072
    assert config.raw["rope_theta"] == 500000.0
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


def test_generation_defaults_need_do_sample(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA31_8B, {"temperature": 0.6, "top_k": 20}).generation_defaults == {}
    sampled = read(tmp_path, LLAMA31_8B, {"do_sample": True, "top_k": 20, "min_p": None})
    assert sampled.generation_defaults == {"top_k": 20}


def test_greedy_decoding_heeds_a_repetition_penalty(tmp_path: Path) -> None:
    """A repetition penalty is a default even without do_sample, as in transformers."""
    defaults = read(tmp_path, LLAMA31_8B, {"top_k": 20, "repetition_penalty": 1.1}).generation_defaults
    assert defaults == {"repetition_penalty": 1.1}
    with pytest.raises(CheckpointError, match=r"repetition_penalty.*greater than 0"):
        read(tmp_path, LLAMA31_8B, {"repetition_penalty": 0})


def test_windows(tmp_path: Path) -> None:
    swa = {"use_sliding_window": True, "sliding_window": 99, "num_hidden_layers": 3, "max_window_layers": 1}
    types = ["full_attention", "sliding_attention", "full_attention"]
    for base, change, expected in (
        (LLAMA31_8B, {"num_hidden_layers": 2, "sliding_window": 17}, (None, None)),
        (MISTRAL_7B, {}, (4096,) * 4),
        (MISTRAL_7B, {"sliding_window": None}, (None,) * 4),
        (QWEN25_05B, {}, (None,) * 24),
        (QWEN25_05B, swa, (None, 99, 99)),
        (QWEN25_05B, {**swa, "layer_types": types}, (None, 99, None)),
        (QWEN25_05B, {**swa, "layer_types": ["full_attention"] * 3, "sliding_window": None}, (None,) * 3),
    ):
        assert read(tmp_path, {**base, **change}).windows == expected, change
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert read(tmp_path, absent).windows == (4096,) * 4  # the default of the class, as in transformers


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 4},
    {"rope_type": "dynamic", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    LLAMA31_8B["rope_scaling"],  # type: ignore[list-item]
]


@pytest.mark.parametrize("scaling", ROPES)
def test_rope_spellings_agree_with_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    old = {**MISTRAL_7B, "rope_theta": 77000.0, "rope_scaling": scaling}
    new = {key: value for key, value in MISTRAL_7B.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {**scaling, "rope_theta": 77000.0}, "dtype": "bfloat16"}
    ours = read(tmp_path, old)
    assert read(tmp_path, new) == ours
    nested = new | {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    assert read(tmp_path, nested).rope == ours.rope

    write(tmp_path, old)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (ours.rope.rope_type, ours.rope.theta) == (theirs.rope_parameters["rope_type"], 77000.0)
    if ours.rope.rope_type != "default":
        _, attention_factor = ROPE_INIT_FUNCTIONS[ours.rope.rope_type](theirs, None)
        assert ours.rope.attention_factor == pytest.approx(attention_factor)
        assert ours.rope.factor == theirs.rope_parameters["factor"]
    original = theirs.rope_parameters.get("original_max_position_embeddings", theirs.max_position_embeddings)
    assert ours.rope.original_max_position_embeddings == original


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({}, 32768),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}, 32768),
    ],
)
def test_max_seq_len(tmp_path: Path, change: dict[str, Any], length: int) -> None:
    assert read(tmp_path, {**QWEN25_05B, **change}).max_seq_len == length


def test_defaults_of_sparse_files(tmp_path: Path) -> None:
    keep = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sparse = {key: QWEN25_05B[key] for key in (*keep, "num_attention_heads", "max_position_embeddings")}
    config = read(tmp_path, sparse)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (14, 64, "float32")
    assert config.rope == RopeConfig(theta=10_000.0, original_max_position_embeddings=32768)
    assert config.eos_token_ids == frozenset()
    assert (config.bos_token_id, config.tie_word_embeddings, config.hidden_act) == (None, False, "silu")
    assert read(tmp_path, {**sparse, "model_type": "qwen3"}).head_dim == 128
    assert read(tmp_path, {**sparse, "head_dim": None}).head_dim == 64
    assert read(tmp_path, {**sparse, "eos_token_id": -1, "pad_token_id": -1}).eos_token_ids == frozenset()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "4096"}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ({"head_dim": 65}, "head_dim"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ({"architectures": []}, "architectures"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
    ({"rope_parameters": {"rope_theta": "many"}}, "rope_parameters.rope_theta"),
    ({"sliding_window": 0}, "sliding_window"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "rope_parameters"),
]


@pytest.mark.parametrize(
    ("error", "change", "field"),
    [(CheckpointError, *case) for case in BAD] + [(UnsupportedError, *case) for case in UNSUPPORTED],
)
def test_bad_fields_are_named(tmp_path: Path, error: type[Exception], change: dict[str, Any], field: str) -> None:
    write(tmp_path, {**MISTRAL_7B, **change})
    with pytest.raises(error) as caught:
        ModelConfig.from_folder(tmp_path, role="draft")
    message = str(caught.value)
    assert message.startswith("draft model: ")
    assert str(tmp_path / "config.json") in message
    assert repr(field) in message


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"target model 'no/such-model' is not on this machine, .*download the model first"
    ):
        ModelConfig.from_folder("no/such-model")
    with pytest.raises(CheckpointError, match=r"draft model: .*config\.json is missing"):
        ModelConfig.from_folder(tmp_path, role="draft")
    for text in ("{", "[1]", "\ufeff"):
        with pytest.raises(CheckpointError, match=r"target model: .*config\.json.*download"):
            ModelConfig.from_folder(write(tmp_path, text))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelConfig.from_folder(write(tmp_path, LLAMA31_8B, "not json"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*'temperature'"):
        ModelConfig.from_folder(write(tmp_path, LLAMA31_8B, {"do_sample": True, "temperature": "hot"}))
