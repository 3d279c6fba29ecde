"""GGUF files compared with the checkpoints that they were made from, with the `gguf` package, and with transformers.

The `gguf` package dequantises such files; transformers reads them by itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.checkpoints import edit_config, make_checkpoint
from tests.gguf_files import write_gguf
from tests.quantized_checkpoints import Kind
from trtspec import LLM, SamplingParams
from trtspec.build.convert import convert
from trtspec.cli import main
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, UnsupportedError, WeightsError
from trtspec.gguf.file import TENSOR_TYPES
from trtspec.gguf.names import KEPT_BITS, hf_name
from trtspec.hub import gguf_folder
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import describe_decoder, hf_tensors, load_decoder, loaded_bytes
from trtspec.ops.packing import unpack
from trtspec.text import Tokenizer

ARCHS = ("llama", "llama31", "llama_linear", "llama_yarn", "qwen2", "qwen3")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}  # K quants have blocks of 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))


def same_bits(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.ascontiguousarray(one).view(np.int32), np.ascontiguousarray(other).view(np.int32)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_is_the_checkpoint_that_it_was_made_from(tmp_path: Path, arch: str, tied: bool) -> None:
    """The file holds all settings of the checkpoint, including rope scaling, and every weight."""
    checkpoint = make_checkpoint(tmp_path, arch, tie_word_embeddings=tied)
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    model, original = ModelConfig.from_folder(file), ModelConfig.from_folder(checkpoint)
    blank = {"path": Path(), "pad_token_id": None, "bos_token_id": None, "eos_token_ids": frozenset()}
    rope = replace(model.rope, **{name: getattr(original.rope, name) for name in ("attention_factor",)})
    assert model.rope.attention_factor == pytest.approx(original.rope.attention_factor)
    assert model.rms_norm_eps == pytest.approx(original.rms_norm_eps, rel=1e-6)
    eps = original.rms_norm_eps
    assert replace(model, **blank, rope=rope, rms_norm_eps=eps) == replace(
        original, **blank, attention_bias=model.attention_bias
    )
    found, expected = (hf_tensors(load_decoder(one, torch.float32)) for one in (model, original))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_reads(tmp_path: Path, arch: str) -> None:
    checkpoint = make_checkpoint(tmp_path, arch, **SIZES)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", "Q5_K", kinds={"token_embd.weight": "Q8_0"})
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    ours = hf_tensors(load_decoder(ModelConfig.from_folder(file), torch.float32))
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", sorted(kind.name for kind in TENSOR_TYPES.values()))
def test_weights_are_those_that_gguf_dequantises(tmp_path: Path, kind: str) -> None:
    """Weights of each kind, as `trtspec convert` writes them, equal those of gguf bit for bit."""
    checkpoint = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, **SIZES)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    ours = load_file(convert(file, tmp_path / "out", "float32") / "model.safetensors")
    for stored in gguf.GGUFReader(file).tensors:
        assert same_bits(ours.pop(str(hf_name(stored.name))), gguf.dequantize(stored.data, stored.tensor_type))
    assert not ours


@pytest.mark.parametrize(("kind", "other", "bits"), [("Q4_0", "Q8_0", 4), ("Q8_0", "Q4_0", 8), ("Q8_0", "Q5_0", 8)])
def test_integers_are_kept(tmp_path: Path, kind: str, other: str, bits: int) -> None:
    """Linears keep the integers of a file, as they keep those of a compressed-tensors checkpoint with the same scales.

    If one part of a fused matrix is of another kind, no part of that matrix keeps its integers.
    """
    checkpoint = make_checkpoint(tmp_path, "llama", **SIZES)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind, kinds={"blk.1.ffn_up.weight": other})
    model = ModelConfig.from_folder(file)
    assert str(model.quantization) == f"compressed-tensors, int{bits} in groups of 32"
    expected = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    for name, heads in (("blk.0.attn_q", 4), ("blk.0.attn_k", 2)):
        rows = expected[f"{name}.weight"]
        expected[f"{name}.weight"] = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    decoder = load_decoder(model, torch.float32)
    for layer in range(2):
        block, here = decoder.layers[layer], f"blk.{layer}."
        linears = {
            ("attn_q", "attn_k", "attn_v"): block.attention.qkv,
            ("attn_output",): block.attention.o,
            ("ffn_gate", "ffn_up"): block.mlp.gate_up,
            ("ffn_down",): block.mlp.down,
        }
        for names, linear in linears.items():
            kept = layer == 0 or names != ("ffn_gate", "ffn_up")
            assert linear.is_packed == kept
            assert not kept or linear.weight.dtype == {4: torch.uint8, 8: torch.int8}[bits]
            held = unpack(linear.weight, linear.scales, linear.zeros, linear.out_features, linear.in_features)
            if layer == 0:
                assert same_bits(held, np.concatenate([expected[f"{here}{name}.weight"] for name in names])), names
    described = describe_decoder(model, torch.float32)
    assert {n: (t.shape, t.dtype) for n, t in described.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in decoder.state_dict().items()
    }
    assert weight_bytes(describe_decoder(model, torch.bfloat16)) == loaded_bytes(model)


def test_integers_of_two_kinds_are_kept(tmp_path: Path) -> None:
    """In a Q4_0 file with down_proj in Q8_0, each linear keeps its own number of bits."""
    down = {f"blk.{layer}.ffn_down.weight": "Q8_0" for layer in range(2)}
    file = write_gguf(make_checkpoint(tmp_path, "qwen3", **SIZES), tmp_path / "model.gguf", "Q4_0", kinds=down)
    model = ModelConfig.from_folder(file)
    assert str(model.quantization) == "compressed-tensors, int4 in groups of 32 and int8 in groups of 32"
    decoder = load_decoder(model, torch.float32)
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    for layer, block in enumerate(decoder.layers):
        for name, linear, dtype in (
            ("ffn_down", block.mlp.down, torch.int8),
            ("attn_output", block.attention.o, torch.uint8),
        ):
            assert linear.weight.dtype == dtype
            held = unpack(linear.weight, linear.scales, linear.zeros, linear.out_features, linear.in_features)
            assert same_bits(held, stored[f"blk.{layer}.{name}.weight"])
    assert weight_bytes(describe_decoder(model, torch.bfloat16)) == loaded_bytes(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KEPT_BITS)
def test_ids_are_those_of_a_checkpoint_with_the_same_integers(tmp_path: Path, kind: str, dtype: str) -> None:
    """Token ids equal those of a checkpoint that compressed-tensors packed from the values that gguf reads."""
    packer = pytest.importorskip("compressed_tensors.compressors.pack_quantized", reason="it needs Python 3.11")
    folder = make_checkpoint(tmp_path, "qwen3", **SIZES, initializer_range=0.1)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    tensors = {}
    for one in gguf.GGUFReader(file).tensors:
        name, values = str(hf_name(one.name)), torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy())
        if "_proj" not in name:
            tensors[name] = values
            continue
        blocks = one.data.reshape(len(values), -1, gguf.GGML_QUANT_SIZES[one.tensor_type][1])
        scales = torch.from_numpy(blocks[:, :, :2].copy()).view(torch.float16)  # [N, K/32, 1]
        integers = (values.view(len(values), -1, 32) / scales.float()).round().to(torch.int8).flatten(1)
        linear = name.removesuffix(".weight")
        tensors |= {
            f"{linear}.weight_packed": packer.pack_to_int32(integers, KEPT_BITS[kind]),
            f"{linear}.weight_scale": scales[:, :, 0].contiguous(),
            f"{linear}.weight_shape": torch.tensor(integers.shape),
        }
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=Kind("pack-quantized", KEPT_BITS[kind], 32).config())
    found, expected = (ids_of(one, dtype) for one in (file, folder))
    assert found == expected
    assert len({token for ids in found for token in ids}) > 20  # the model does not repeat one token


def ids_of(model: Path, dtype: str) -> list[list[int]]:
    prompts = torch.randint(3, 199, (4, 12), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(model, dtype=dtype, backend="eager", max_seq_len=64, max_batch_size=4)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True), False)
    llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_folder_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    first = ModelConfig.from_folder(file).path
    assert ModelConfig.from_folder(file).path == first
    assert {path.name for path in first.iterdir()} == {".lock", "config.json", "generation_config.json", "model.gguf"}
    write_gguf(make_checkpoint(tmp_path, "llama", name="other", num_hidden_layers=1), file)
    second = ModelConfig.from_folder(file)
    assert second.path != first
    assert second.num_layers == 1
    assert not list((tmp_path / "cache").glob("filling-*"))


@pytest.mark.parametrize("older", [False, True])
def test_a_folder_that_no_process_uses_is_evicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "model.gguf")
    folder = ModelConfig.from_folder(file).path
    assert main(["cache", "list"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if str(file) in line)
    assert "of a GGUF file" in row
    assert row.split()[-1] == "yes"
    assert main(["cache", "clear"]) == 0
    assert "0 removed, 1 left, 1 of them in use" in capsys.readouterr().out
    gguf_folder._folder.cache_clear()  # as when the process ends
    if older:  # such folders had no lock
        (folder / ".lock").unlink()
    assert main(["cache", "clear"]) == 0
    assert "1 removed, 0 left" in capsys.readouterr().out
    assert (folder.exists(), file.exists()) == (False, True)
    assert ModelConfig.from_folder(file).path == folder


def test_without_a_cache_the_folder_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", "off")
    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "model.gguf")
    model = ModelConfig.from_folder(file)
    assert model.path.name.startswith("trtspec-gguf-")
    assert len(hf_tensors(load_decoder(model, torch.float32))) == 3 * 9 + 3


def read(tmp_path: Path, extra: Any) -> ModelConfig:
    return ModelConfig.from_folder(write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "model.gguf", extra=extra))


@pytest.mark.parametrize(
    ("entries", "factor"),
    [
        ({"scale_linear": 8.0}, 8),
        ({"scaling.factor": 4.0}, 4),
        ({"scaling.factor": 0.0}, 1),
        ({"scale_linear": 1.0}, 1),
    ],
)
def test_a_factor_alone_is_a_linear_one(tmp_path: Path, entries: dict[str, float], factor: float) -> None:
    """Files of 2023 name no kind of scaling. llama.cpp reads them as linear, and 0 as none."""

    def extra(writer: gguf.GGUFWriter) -> None:
        for key, value in entries.items():
            writer.add_float32(f"llama.rope.{key}", value)

    rope = read(tmp_path, extra).rope
    assert (rope.rope_type, rope.factor) == (("default", 1.0) if factor == 1 else ("linear", factor))


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def test_all_settings_of_yarn_are_read_or_refused(tmp_path: Path) -> None:
    def betas(writer: gguf.GGUFWriter) -> None:
        yarn(writer)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_rope_scaling_yarn_ext_factor(1.0)

    rope = read(tmp_path, betas).rope
    assert (rope.rope_type, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 4.0, 16.0, 2.0)
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):

        def extra(writer: gguf.GGUFWriter, key: str = f"llama.rope.scaling.{name}") -> None:
            yarn(writer)
            writer.add_float32(key, 0.5)

        refused(tmp_path, extra, f"'llama.rope.scaling.{name}' = 0.5 is not read; only [01] is supported")


def test_tokens_end_a_text_by_their_names_and_templates_have_names(tmp_path: Path) -> None:
    """As in llama.cpp, as files name one token that ends a text. A word of plain text is none, whatever it is."""
    tokens = [*"abc", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>"]
    kinds = [1, 1, 1, 1, 3, 3, 3, 4, 1]

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(6)
        writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])

    model = read(tmp_path, extra)
    assert model.eos_token_ids == {4, 6, 7}
    tokenizer = Tokenizer.from_folder(model.path)
    assert tokenizer is not None
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


def refused(tmp_path: Path, extra: Any, match: str, error: type[Exception] = UnsupportedError) -> None:
    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(error, match=match):
        load_decoder(ModelConfig.from_folder(file), torch.float32)


def test_what_such_models_may_have_and_we_do_not_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, lambda writer: writer.add_expert_count(8), "'llama.expert_count' = 8")
    refused(tmp_path, lambda writer: writer.add_sliding_window(4096), "'llama.attention.sliding_window' = 4096")
    refused(tmp_path, lambda writer: writer.add_rope_dimension_count(8), "'llama.rope.dimension_count' = 8.*only 16")
    refused(
        tmp_path,
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "'llama.rope.scaling.type' = 'longrope'.*none, linear, yarn",
    )
    refused(tmp_path, lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts.*llama-gguf-split --merge")
    refused(
        tmp_path,
        lambda writer: writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32)),
        "rope_freqs.weight are not those of a llama3 rope scaling",
    )
    refused(
        tmp_path,
        lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 64), np.float32)),
        "unexpected: blk.0.ffn_gate_inp.weight",
        WeightsError,
    )


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(UnsupportedError, match=r"'general.architecture' = 'gemma3'.*llama, qwen2, qwen3"):
        ModelConfig.from_folder(tmp_path / "model.gguf")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        ModelConfig.from_folder(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        ModelConfig.from_folder(tmp_path / "model.gguf")
