"""`trtspec build --dry_run`: plans from config.json files alone, with bytes from arithmetic.

The two large models have the config.json of their publishers. Expected sizes are computed here by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import edit_config
from tests.fp8_checkpoints import Fp8Kind
from tests.quantized_checkpoints import Kind
from trtspec.cli import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
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
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMALL_QWEN = {
    **QWEN,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}

# Elements, by hand: q, k, v, o; gate, up, down; norms.
LLAMA_LINEARS = 32 * (4096 * 4096 + 2 * 1024 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
LLAMA_REST = 32 * 2 * 4096 + 4096 + 128256 * 4096 + 128256 * 4096  # the last two: embedding, lm_head
HEAD_LINEARS = 4096 * (3 * 4096) + 4096 * 8192 + 2 * 1024 * 8192 + 4096 * 4096 + 3 * 14336 * 4096 + 32000 * 4096
HEAD_NORMS = 4 * 4096  # norms of token, hidden state, MLP, output
QWEN_WEIGHTS = (
    64 * (8192 * 5120 + 2 * 1024 * 5120 + 5120 * 8192 + 3 * 25600 * 5120 + 2 * 5120 + 2 * 128)
    + 2 * 151936 * 5120
    + 5120
)
SMALL_QWEN_WEIGHTS = (
    28 * (2048 * 1024 + 2 * 1024 * 1024 + 1024 * 2048 + 3 * 3072 * 1024 + 2 * 1024 + 2 * 128) + 151936 * 1024 + 1024
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a config.json and nothing else."""
    root = tmp_path_factory.mktemp("configs")
    for name, config in {"llama": LLAMA, "head": HEAD, "qwen": QWEN, "small-qwen": SMALL_QWEN}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def dry_run(tmp_path: Path, target: Path, draft: Path, mode: str, *options: str) -> dict[str, Any]:
    """The JSON plan for 8 requests of 8192 tokens and K = 3."""
    arguments = ["--checkpoint_dir", str(target), "--output_dir", str(tmp_path / "engine"), "--dry_run"]
    arguments += ["--speculative_decoding_mode", mode, "--speculative_model_dir", str(draft), "--max_draft_len", "3"]
    arguments += ["--max_batch_size", "8", "--max_seq_len", "8192", "--json", str(tmp_path / "plan.json")]
    assert main(["build", *arguments, *options]) == 0
    assert not (tmp_path / "engine").exists()
    plan: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return plan


@pytest.mark.parametrize(("backend", "size"), [("aoti", 2), ("tensorrt", 2), ("onnx", 4)])
def test_llama_and_eagle3(
    configs: Path, tmp_path: Path, backend: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backend", backend, *(["--dtype", "float32"] if backend == "onnx" else [])]
    plan = dry_run(tmp_path, configs / "llama", configs / "head", "EAGLE3_ONE_MODEL", *options)
    assert LLAMA_LINEARS + LLAMA_REST == 8_030_261_248  # as published
    target = plan["executables"]["target"]
    assert target["weights"] == {
        "target": (LLAMA_LINEARS + LLAMA_REST) * size,
        "head": (HEAD_LINEARS + HEAD_NORMS) * size,
    }
    each = HEAD_LINEARS - 4096 * (3 * 4096) + 4096 + 3 * 4096  # fc runs once, everything else for each of 3 drafts
    read = LLAMA_LINEARS + LLAMA_REST - 128256 * 4096 + 4096 * (3 * 4096) + 3 * each
    assert target["weights_per_step"] == read * size
    assert plan["kv_bytes_per_token"] == (32 + 1) * 2 * 8 * 128 * size
    blocks = 8 * (8192 // 16) + 1
    assert target["kv"]["blocks"] == blocks
    assert target["kv"]["bytes"] == plan["memory"]["kv"] == blocks * 16 * 33 * 2 * 8 * 128 * size
    # cos and sin of target and head; the target ids of draft ids, their distance, and the draft ids of target ids
    assert target["tables"] == 2 * 2 * 8192 * 128 * 4 + (2 * 32000 + 128256) * 8
    activations = {part["name"]: (part["shape"], part["bytes"]) for part in target["activations"]}
    assert activations["logits"] == ([8 * 4, 128256], 8 * 4 * 128256 * 4)
    assert activations["hidden states"] == ([2048, 4096], 2048 * 4096 * size)
    assert activations["captured hidden states"] == ([2048, 3 * 4096], 2048 * 3 * 4096 * size)
    assert activations["logits of drafts"] == ([8, 32000], 8 * 32000 * 4)
    assert plan["memory"]["total"] == sum(plan["memory"][part] for part in ("weights", "tables", "kv", "activations"))
    assert len(plan["missing"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert f"not there yet: target model: no model.safetensors (or model.safetensors.index.json) in {configs}" in shown
    assert f"weights of target │ {(LLAMA_LINEARS + LLAMA_REST) * size / 1e6:.1f}" in shown


@pytest.mark.parametrize(
    ("quantization", "per_element"),
    [
        ("int8", 1 + 4 / 4096),
        ("int4", 1 / 2 + 3 / 32),
        *(pytest.param(f"int4_g{n}", 1 / 2 + 3 / n, marks=pytest.mark.long) for n in (64, 128)),
    ],
)
def test_quantised_llama(configs: Path, tmp_path: Path, quantization: str, per_element: float) -> None:
    """Quantised weights are integers with scales.

    There is one fp32 scale per output, or one fp16 scale and a byte of zero point per group.
    """
    plan = dry_run(tmp_path, configs / "llama", configs / "head", "EAGLE3_ONE_MODEL", "--quantization", quantization)
    linears = LLAMA_LINEARS * per_element
    if quantization == "int8":  # only down does not have 4096 inputs
        linears = LLAMA_LINEARS + 32 * 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    weights = plan["executables"]["target"]["weights"]
    assert weights["target"] == linears + LLAMA_REST * 2
    assert weights["head"] == (HEAD_LINEARS + HEAD_NORMS) * 2  # speculative_config has a quantization of its own


@pytest.mark.parametrize("backend", ["aoti", "tensorrt"])
def test_llama_in_fp8(configs: Path, tmp_path: Path, backend: str) -> None:
    """fp8 weights take one byte each and one fp32 scale per output.

    The inputs of each of a layer's four matrices have one scale more.
    """
    folder = tmp_path / "fp8"
    shutil.copytree(configs / "llama", folder)
    edit_config(folder, quantization_config=Fp8Kind("modelopt").config())
    plan = dry_run(tmp_path, folder, configs / "head", "EAGLE3_ONE_MODEL", "--backend", backend)
    scales = 32 * (4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) + 4 * 4)
    weights = plan["executables"]["target"]["weights"]
    assert weights["target"] == LLAMA_LINEARS + scales + LLAMA_REST * 2
    assert weights["head"] == (HEAD_LINEARS + HEAD_NORMS) * 2


@pytest.mark.parametrize("backend", ["aoti", "tensorrt"])
def test_llama_in_8_bits_in_groups(configs: Path, tmp_path: Path, backend: str) -> None:
    """A weight of 8 bits in groups has a byte each, and an fp16 scale for 32 of them."""
    folder = tmp_path / "int8"
    shutil.copytree(configs / "llama", folder)
    edit_config(folder, quantization_config=Kind("pack-quantized", 8, 32).config())
    plan = dry_run(tmp_path, folder, configs / "head", "EAGLE3_ONE_MODEL", "--backend", backend)
    target = plan["executables"]["target"]
    assert target["weights"]["target"] == LLAMA_LINEARS * (1 + 2 / 32) + LLAMA_REST * 2
    plugins = {call["name"]: call["count"] for call in target["plugins"]}
    in_groups = 4 * 32 if backend == "tensorrt" else 0
    assert plugins.get("trtspec::QuantizeGroups", 0) == plugins.get("trtspec::GroupsLinear", 0) == in_groups


@pytest.mark.parametrize("backend", ["aoti", pytest.param("tensorrt", marks=pytest.mark.long)])
def test_qwen_and_a_draft_model(configs: Path, tmp_path: Path, backend: str) -> None:
    plan = dry_run(tmp_path, configs / "qwen", configs / "small-qwen", "DRAFT_TARGET", "--backend", backend)
    assert SMALL_QWEN_WEIGHTS == 596_049_920  # as published
    target, draft = plan["executables"]["target"], plan["executables"]["draft"]
    assert target["weights"] == {"target": QWEN_WEIGHTS * 2}
    assert draft["weights"] == {"draft": SMALL_QWEN_WEIGHTS * 2}
    assert target["weights_per_step"] == (QWEN_WEIGHTS - 151936 * 5120) * 2
    assert draft["weights_per_step"] == SMALL_QWEN_WEIGHTS * 2  # tied: the embedding is the lm_head
    assert target["kv"]["bytes_per_token"] == 64 * 2 * 8 * 128 * 2
    assert draft["kv"]["bytes_per_token"] == 28 * 2 * 8 * 128 * 2
    assert target["kv"]["bytes_per_block"] == 16 * 64 * 2 * 8 * 128 * 2
    blocks = 8 * (8192 // 16) + 1
    assert plan["memory"]["kv"] == blocks * 16 * (64 + 28) * 2 * 8 * 128 * 2
    assert plan["memory"]["weights"] == (QWEN_WEIGHTS + SMALL_QWEN_WEIGHTS) * 2


def test_attention_of_tensorrts_own(configs: Path, tmp_path: Path) -> None:
    """TensorRT's own attention needs no plugin, and a cache of 8 whole sequences.

    A sequence has 8192 tokens, and the drafts of this step and the next.
    """
    options = ["--backend", "tensorrt", "--attention", "native"]
    plan = dry_run(tmp_path, configs / "small-qwen", configs / "small-qwen", "DRAFT_TARGET", *options)
    tokens = 8192 + 2 * 3 + 2  # a multiple of eight
    assert plan["memory"]["kv"] == 8 * tokens * (28 + 28) * 2 * 8 * 128 * 2
    for made in plan["executables"].values():
        assert "trtspec::SpecAttention" not in {plugin["name"] for plugin in made["plugins"]}
        for profile in made["profiles"]["0"]:
            assert profile["shapes"]["k_cache_0"] == [[8, 8, tokens, 128]] * 3
            assert profile["shapes"]["block_tables"] == [[1, 1], [8, 1], [8, 1]]


def test_profiles_and_plugins(configs: Path, tmp_path: Path) -> None:
    plan = dry_run(
        tmp_path, configs / "llama", configs / "head", "EAGLE3_ONE_MODEL", "--backend", "tensorrt", "--opt_num_tokens",
        "512", "--refit", "--workers", "1", "--output_timing_cache", "cache.bin",
    )  # fmt: skip
    assert plan["options"] == {
        "opt_num_tokens": 512,
        "workers": 1,
        "input_timing_cache": None,
        "output_timing_cache": "cache.bin",
        "attention": "plugin",
        "weight_streaming": False,
        "refit": True,
        "strip_plan": False,
        "version_compatible": False,
        "hardware_compatibility": "none",
        "sm": [],
    }
    target = plan["executables"]["target"]
    [graph] = target["graphs"]
    mixed, generation = target["profiles"]["3"]
    assert (graph["kind"], mixed["name"], generation["name"]) == ("ragged", "mixed", "generation")
    shapes = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in graph["inputs"]}
    assert mixed["shapes"].keys() == shapes.keys() | set(target["kv"]["inputs"])
    assert shapes["draft_tokens"] == ("int64", ["G", "K"])
    assert mixed["shapes"]["input_ids"] == [[1], [512], [2048]]
    assert generation["shapes"]["input_ids"] == [[1], [32], [32]]  # 8 requests of K + 1 rows
    assert mixed["shapes"]["block_tables"] == [[1, 1], [8, 256], [8, 513]]  # 8192 tokens, and drafts past the last
    assert mixed["shapes"]["v_cache_32"] == [[4097, 16, 8, 128]] * 3
    assert {call["name"]: call["count"] for call in target["plugins"]} == {
        "trtspec::SpecAttention": 32,
        "trtspec::SpecAttentionChained": 3,  # one layer, a pass for each draft
        "trtspec::LinearLogits": 1 + 3,
        "trtspec::ProcessLogitsConstrained": 1,
        "trtspec::ProcessLogits": 3,
        "trtspec::SpecSample": 1,
        "trtspec::SpecSampleVocab": 3,
        "trtspec::SpecAccept": 1,
    }


def test_no_memory_is_taken(configs: Path) -> None:
    """Planning 66 GB of weights and 62 GB of KV makes the process grow by less than 1 % of that."""
    code = f"""
import resource
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config
wishes = {{"method": "draft_model", "model": {str(configs / "small-qwen")!r}, "num_speculative_tokens": 4}}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan_build({str(configs / "qwen")!r}, read_speculative_config(wishes), EngineConfig(backend="tensorrt"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512e6


# -- refusals ---------------------------------------------------------------------------------------------------------

ADAPTIVE = {"method": "ngram", "num_speculative_tokens": 4, "enable_adaptive_verification": True}
REFUSED: dict[str, tuple[list[str], str]] = {
    "native attention and the cache's size": (
        ["--backend", "tensorrt", "--attention", "native", "--num_kv_blocks", "99", "--dry_run"],
        "leave num_kv_blocks and kv_cache_memory unset",
    ),
    "no tensorrt": (["--backend", "tensorrt"], "TensorRT is missing"),
    "the cache of others": (["--num_kv_blocks", "99"], "--num_kv_blocks: for --backend tensorrt, tensorrt_rtx alone"),
    "the plugin of others": (
        ["--backend", "tensorrt_rtx", "--attention", "plugin"],
        "--attention plugin: tensorrt_rtx has TensorRT's own attention alone; leave it out",
    ),
    "options of tensorrt": (["--refit", "--workers", "2", "--dry_run"], "--workers, --refit: for --backend tensorrt"),
    "unknown attention": (["--backend", "tensorrt", "--attention", "flash", "--dry_run"], "plugin, native"),
    "no plan to write": (["--json", "plan.json"], "--json plan.json is for the plan that --dry_run makes"),
    "half precision on onnx": (["--backend", "onnx", "--dry_run"], "ask for dtype float32"),
    "a number of drafts that the engine chooses": (
        ["--backend", "tensorrt", "--dry_run", "--spec", json.dumps(ADAPTIVE)],
        "enable_adaptive_verification is set, and backend tensorrt cannot choose the number of drafts yet",
    ),
    "kv_dtype": (["--kv_dtype", "fp8", "--backend", "tensorrt", "--dry_run"], "--kv_dtype fp8 is not built"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(configs: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = REFUSED[case]
    arguments = ["--checkpoint_dir", str(configs / "llama"), "--output_dir", str(tmp_path / "engine")]
    assert main(["build", *arguments, *options]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
