"""Models without values have the tensors of loaded ones, and refuse the names and shapes that loading refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.head_checkpoints import make_eagle3
from tests.models.built_heads import head_of
from tests.quantized_checkpoints import Kind, quantised
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.models.layers import weight_bytes
from trtspec.models.pack_weights import pack_decoder
from trtspec.models.weights import describe_decoder, load_decoder, missing_weights

KINDS = [
    Kind("pack-quantized", 4, 32, False, scales=torch.bfloat16),
    Kind("int-quantized", 8, -1),
    Kind("pack-quantized", 8, 32),
    Kind("gptq", 8, 64, ordered=True),
    Kind("gptq", 4, 32),
    Kind("gptq", 4, 32, ordered=True),
    Kind("awq", 4, 64, False),
]


def facts(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every parameter and buffer, including each name of a shared one."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def assert_described(described: nn.Module, loaded: nn.Module) -> None:
    assert facts(described) == facts(loaded)
    assert all(tensor.is_meta for tensor in [*described.parameters(), *described.buffers()])
    assert weight_bytes(described) == weight_bytes(loaded)


def without_weights(folder: Path, name: str) -> Path:
    """Make a copy of the folder that has only its config.json."""
    copy = folder.with_name(name)
    copy.mkdir()
    shutil.copyfile(folder / "config.json", copy / "config.json")
    return copy


@pytest.mark.parametrize("quantization", [None, "int8", "int4_g64"])
@pytest.mark.parametrize("arch", ["llama31", "llama_dynamic", "llama_yarn", "mistral_swa", "qwen2", "qwen3"])
def test_a_decoder(tmp_path: Path, arch: str, quantization: str | None) -> None:
    folder = make_checkpoint(tmp_path, arch, "bfloat16", tie_word_embeddings=arch == "qwen3")
    loaded = load_decoder(ModelConfig.from_folder(folder), torch.bfloat16)
    bare = without_weights(folder, "bare")
    for there in (folder, bare):
        described = describe_decoder(ModelConfig.from_folder(there), torch.bfloat16)
        assert_described(described, loaded)
    pack_decoder(loaded, quantization)
    pack_decoder(described, quantization)
    assert_described(described, loaded)
    assert described.weight_bytes_per_step == loaded.weight_bytes_per_step


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_decoder_of_integers(tmp_path: Path, kind: Kind) -> None:
    folder, _ = quantised(make_checkpoint(tmp_path, "llama"), tmp_path, kind)
    loaded = load_decoder(ModelConfig.from_folder(folder), torch.float32)
    for there in (folder, without_weights(folder, "bare")):
        assert_described(describe_decoder(ModelConfig.from_folder(there), torch.float32), loaded)


@pytest.mark.parametrize("ids", [None, range(0, 199, 3)], ids=["all", "some"])
def test_a_head(tmp_path: Path, ids: range | None) -> None:
    target = ModelConfig.from_folder(make_checkpoint(tmp_path, "llama"))
    folder = make_eagle3(tmp_path, target.path, (0, 1, 2), None if ids is None else [*ids])
    decoder, described_decoder = load_decoder(target, torch.float32), describe_decoder(target, torch.float32)
    loaded = head_of("eagle3", folder, decoder, num_captured=3)
    for there in (folder, without_weights(folder, "bare")):
        described = head_of("eagle3", there, described_decoder, num_captured=3)
        assert_described(described, loaded)
        assert described.embedding is described_decoder.embedding


def test_a_head_whose_weights_say_more_than_its_config(tmp_path: Path) -> None:
    target = ModelConfig.from_folder(make_checkpoint(tmp_path, "qwen3"))
    folder = make_eagle3(tmp_path, target.path, (0, 1), qk_norm=True, own_embedding=True, own_head=False)
    loaded, described = (
        head_of("eagle3", folder, make(target, torch.float32), num_captured=2)
        for make in (load_decoder, describe_decoder)
    )
    assert_described(described, loaded)


WRONG: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing: model.norm.weight": lambda tensors: tensors.pop("model.norm.weight"),
    "unexpected: extra": lambda tensors: tensors.update(extra=torch.zeros(3)),
    r"wrong shape: model.norm.weight is \(63,\), expected \(64,\)": lambda tensors: tensors.update(
        {"model.norm.weight": torch.zeros(63)}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_headers_that_do_not_fit(tmp_path: Path, message: str) -> None:
    """Describing a model raises an error with the same message as loading it."""
    folder = make_checkpoint(tmp_path, "llama")
    edit_tensors(folder, WRONG[message])
    config, said = ModelConfig.from_folder(folder), []
    for make in (load_decoder, describe_decoder):
        with pytest.raises(WeightsError, match=message) as error:
            make(config, torch.float32)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_headers_of_a_head_that_do_not_fit(tmp_path: Path) -> None:
    target = ModelConfig.from_folder(make_checkpoint(tmp_path, "llama"))
    folder = make_eagle3(tmp_path, target.path, (0, 1), [*range(83)])
    decoder, bare = load_decoder(target, torch.float32), describe_decoder(target, torch.float32)
    edit_tensors(folder, lambda tensors: tensors.update(t2d=torch.ones(198, dtype=torch.bool)))
    wrong: list[tuple[str, int]] = [("fuses 2 hidden states of 64, but 3 hidden", 3), (r"t2d is \(198,\), expected", 2)]
    for message, captured in wrong:
        for one in (decoder, bare):
            with pytest.raises(WeightsError, match=message):
                head_of("eagle3", folder, one, num_captured=captured)


def test_what_missing_weights_are_called(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    assert missing_weights(folder, "target") is None
    file = folder / "model.safetensors"
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="pickle"):
        missing_weights(folder, "target")
    (folder / "pytorch_model.bin").rename(folder / "elsewhere")
    assert re.search(r"^target model: no model\.safetensors .* in ", missing_weights(folder, "target") or "")
    file.write_bytes((folder / "elsewhere").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        describe_decoder(ModelConfig.from_folder(folder), torch.float32)


def test_integers_that_cannot_be_held_are_refused_without_weights(tmp_path: Path) -> None:
    folder = without_weights(make_checkpoint(tmp_path, "llama"), "bare")
    edit_config(folder, quantization_config=Kind("awq", 4, 96, False).config())
    with pytest.raises(TrtSpecError, match="no multiple of its groups of 96"):
        describe_decoder(ModelConfig.from_folder(folder), torch.float32)
