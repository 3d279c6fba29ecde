"""Strict loading: weights that do not fit are refused, and the error names the model, the file and the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import ARCHS, make_checkpoint, make_mimo, oracle
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, UnsupportedError, WeightsError
from trtspec.models.decoder import Decoder
from trtspec.models.layers import Linear, allocate, unallocated
from trtspec.models.slots import Slot
from trtspec.models.specs import decoder_spec
from trtspec.models.weights import hf_tensors, load_decoder, load_weights

Tensors = dict[str, torch.Tensor]


def load(folder: Path, role: str = "target") -> Decoder:
    return load_decoder(ModelConfig.from_folder(folder, role), torch.float32, role)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_tensor_lands_where_it_belongs(tmp_path: Path, arch: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, arch, tie_word_embeddings=tied)
    decoder = load(folder)
    saved = load_file(folder / "model.safetensors")
    ours = hf_tensors(decoder)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    assert not any(parameter.isnan().any() for parameter in decoder.parameters())
    assert not decoder.training
    assert decoder_spec(ModelConfig.from_folder(folder)).num_parameters == oracle(folder).num_parameters()
    if tied:
        assert decoder.head.weight is decoder.embedding.weight


def test_sharded(tmp_path: Path) -> None:
    one = hf_tensors(load(make_checkpoint(tmp_path, "qwen3", name="one")))
    folder = make_checkpoint(tmp_path, "qwen3", name="many", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    many = hf_tensors(load(folder))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_weights_are_cast(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_checkpoint(tmp_path, "llama", "bfloat16"))
    assert config.dtype == "bfloat16"
    decoder = load_decoder(config, torch.float32)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert decoder.rotary.cos.dtype == torch.float32


def test_unallocated_weights(tmp_path: Path) -> None:
    """Unallocated weights have a dtype but no memory; allocated ones have memory but no values yet.

    A module that is built later is built as usual.
    """
    with unallocated(torch.bfloat16):
        empty = Linear(4, 6, bias=True)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert empty.scales.device.type == "cpu"
    load_weights(empty, {"half": Slot("weight", 3, (3, 4))}, [("half", torch.ones(3, 4))], tmp_path, "target")
    assert empty.weight[:3].isnan().all()
    assert (empty.weight[3:] == 1).all()
    assert empty.bias is not None
    assert empty.bias.is_meta
    allocate(empty.bias)
    assert empty.bias.isnan().all()
    assert empty.bias.dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), unallocated(torch.bfloat16):
        raise ZeroDivisionError
    after = Linear(4, 6, bias=False).weight
    assert after.isnan().all()
    assert after.dtype == torch.float32


@pytest.mark.parametrize("role", ["target", "draft"])
def test_missing_extra_and_misshaped_tensors(tmp_path: Path, role: str) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.ones(3)

    folder = make_checkpoint(tmp_path, "qwen2")
    edit(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder, role)
    message = str(caught.value)
    assert message.startswith(f"{role} weights in {folder}")
    assert "missing: model.layers.1.self_attn.k_proj.bias" in message
    assert "unexpected: model.layers.0.mlp.extra.weight" in message
    assert "model.norm.weight is (3,), expected (64,)" in message


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "lm_head.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
        ("mistral_swa", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_each_missing_tensor_is_named(tmp_path: Path, arch: str, name: str) -> None:
    folder = make_checkpoint(tmp_path, arch)
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        load(folder)


def test_layers_beyond_the_config_are_unexpected(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.2\..* and 1 more"):
        load(folder)


def test_mtp_layers_are_no_part_of_the_target_where_its_architecture_says_so(tmp_path: Path) -> None:
    """Only tensors with the MTP prefix are left out of the target.

    Tensors with a similar prefix, or the same tensors in another architecture, are unexpected.
    """
    folder = make_mimo(tmp_path, 2)
    saved = load_file(folder / "model.safetensors")
    modules = {name: tensor for name, tensor in saved.items() if name.startswith("model.mtp_layers.")}
    assert len(modules) == 2 * 16
    ours = hf_tensors(load(folder))
    assert ours.keys() == saved.keys() - modules.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)
    edit(folder, lambda tensors: tensors.update({"model.mtp_norm.weight": torch.zeros(2)}))
    with pytest.raises(WeightsError, match=r"unexpected: model\.mtp_norm\.weight\. "):
        load(folder)
    other = make_checkpoint(tmp_path, "qwen2")
    edit(other, lambda tensors: tensors.update(modules))
    with pytest.raises(WeightsError, match=r"unexpected: model\.mtp_layers\.0\..* and 24 more"):
        load(other)


def test_harmless_extras_are_accepted(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit(folder, change)
    load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"draft model: .*model\.safetensors is damaged or truncated"):
        load(folder, "draft")


def test_missing_config(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"draft model: .*config\.json is missing"):
        load(folder, "draft")


def test_missing_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"target model: no model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_weights_are_refused(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    torch.save(load_file(folder / "model.safetensors"), folder / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=rf"draft model: .*pickle weights \({name}\).*save_pretrained"):
        load(folder, "draft")


def test_missing_shard_and_damaged_index(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"draft model: .* lacks the shards {gone.name}"):
        load(folder, "draft")
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"target model: .*index\.json is damaged"):
            load(folder)


def test_unknown_architecture(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel.*supported: LlamaForCausalLM"):
        load(folder)
