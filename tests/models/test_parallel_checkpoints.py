"""Heads that draft in one pass over mask tokens.

The tests show what is loaded, what is described, which weights are read once, and which checkpoints are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.head_checkpoints import make_dflash, make_eagle3
from tests.models.built_heads import head_of
from tests.models.paper_heads import VOCAB, K
from tests.models.test_parallel_heads import MASK
from trtspec import LLM
from trtspec.build.plan import plan_build
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.methods.dflash.worker import DFlashWorker
from trtspec.methods.parallel.worker import PEagleWorker
from trtspec.models.weights import describe_decoder, load_decoder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


def test_a_described_head_is_the_loaded_one(tmp_path: Path, target: Path) -> None:
    folder = make_eagle3(tmp_path, target, mask=MASK, num_layers=3)
    loaded, described = (
        head_of("eagle3", folder, make(ModelConfig.from_folder(target), torch.float32), num_captured=3, parallel=True)
        for make in (load_decoder, describe_decoder)
    )
    assert len(loaded.kv_layers) == 3
    assert described.kv_layers == loaded.kv_layers
    shapes = {name: parameter.shape for name, parameter in loaded.named_parameters()}
    assert {name: parameter.shape for name, parameter in described.named_parameters()} == shapes
    assert shapes["mask_hidden"] == (3 * 64,)


def test_a_described_dflash_draft_is_the_loaded_one(tmp_path: Path, target: Path) -> None:
    folder = make_dflash(tmp_path, target, (1, 2), MASK)
    loaded, described = (
        head_of("dflash", folder, make(ModelConfig.from_folder(target), torch.float32), num_captured=2)
        for make in (load_decoder, describe_decoder)
    )
    assert described.kv_layers == loaded.kv_layers
    shapes = {name: parameter.shape for name, parameter in loaded.named_parameters()}
    assert {name: parameter.shape for name, parameter in described.named_parameters()} == shapes


def opened(target: Path, head: Path, method: str = "eagle3", **fields: Any) -> None:
    speculation = {"method": method, "model": str(head), "num_speculative_tokens": K, "parallel_drafting": True}
    with LLM(target, {**speculation, **fields}) as llm:
        llm.generate([1, 2, 3])


def test_one_pass_reads_its_weights_once(tmp_path: Path, target: Path) -> None:
    """A step counts the weights of its one pass once, without the embedding.

    mask_hidden is not counted among the matrices.
    """
    head = make_eagle3(tmp_path, target, mask=MASK, num_layers=2)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    loaded = head_of("eagle3", head, decoder, num_captured=3, parallel=True)
    worker = PEagleWorker(loaded, K, (0, 1, 2), mask_token_id=MASK)
    tensors = load_file(head / "model.safetensors")
    assert worker.weight_bytes_per_step == sum(t.nbytes for name, t in tensors.items() if name != "mask_hidden")
    assert worker.draft_rows == K


def test_a_block_reads_what_the_text_does_once_more(tmp_path: Path, target: Path) -> None:
    folder = make_dflash(tmp_path, target, (1, 2), MASK)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    worker = DFlashWorker(head_of("dflash", folder, decoder, num_captured=2), K, (1, 2), mask_token_id=MASK)
    tensors = load_file(folder / "model.safetensors")
    twice = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    own = sum(t.nbytes * (2 if any(part in name for part in twice) else 1) for name, t in tensors.items())
    assert worker.weight_bytes_per_step == own + decoder.head.weight.nbytes


Bad = tuple[Callable[[Path], object], type[TrtSpecError], tuple[str, ...]]

BAD: dict[str, Bad] = {
    "no mask token": (
        lambda folder: edit_config(folder, ptd_token_id=None),
        ConfigError,
        ("pard_token, mask_token_id",),
    ),
    "a mask token past the end": (
        lambda folder: edit_config(folder, ptd_token_id=VOCAB),
        ConfigError,
        (f"mask token {VOCAB}", f"vocabulary of {VOCAB} ids"),
    ),
    "a mask token that is none": (
        lambda folder: edit_config(folder, ptd_token_id="<mask>"),
        CheckpointError,
        ("ptd_token_id", "not an integer"),
    ),
    "no mask_hidden": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("mask_hidden")),
        WeightsError,
        ("missing: mask_hidden (192,)",),
    ),
    "a mask_hidden of another width": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update(mask_hidden=torch.zeros(1, 1, 64))),
        WeightsError,
        ("mask_hidden is (64,), expected (192,)",),
    ),
    "a layer fewer than it says": (
        lambda folder: edit_config(folder, num_hidden_layers=3),
        WeightsError,
        ("missing", "layers.2.mlp.up_proj.weight"),
    ),
    "a norm before fc that is not there": (
        lambda folder: edit_config(folder, norm_before_fc=True),
        WeightsError,
        ("missing: input_norm.weight (192,)",),
    ),
    "two norms of the states": (
        lambda folder: edit_config(folder, norm_before_fc=True, eagle_config={"fc_norm": True}),
        CheckpointError,
        ("norm_before_fc and fc_norm exclude each other",),
    ),
    "a switch that is none": (
        lambda folder: edit_config(folder, norm_output="yes"),
        CheckpointError,
        ("norm_output = 'yes' is not true or false",),
    ),
    "SpecForge's layout": (
        lambda folder: edit_config(folder, architectures=["PEagleDraftModel"]),
        UnsupportedError,
        ("'PEagleDraftModel' is no EAGLE3 head we run", "PeagleLlamaForCausalLM"),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_head_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    change, error, words = BAD[what]
    head = make_eagle3(tmp_path, target, (0, 1, 2), mask=MASK, num_layers=2)
    opened(target, head)
    change(head)
    with pytest.raises(error) as caught:
        opened(target, head)
    assert all(word in str(caught.value) for word in words), caught.value


def test_heads_for_parallel_drafting_say_so_where_it_is_not_asked_for(tmp_path: Path, target: Path) -> None:
    head = make_eagle3(tmp_path, target, mask=MASK, num_layers=2)
    with pytest.raises(UnsupportedError, match=r"num_hidden_layers = 2; .* one layer run; .*parallel_drafting=True"):
        opened(target, head, parallel_drafting=False)
    edit_config(head, architectures=["PeagleLlamaForCausalLM"])
    with pytest.raises(UnsupportedError, match=r"'PeagleLlamaForCausalLM' is no EAGLE3 head .*parallel_drafting=True"):
        opened(target, head, parallel_drafting=False)


@pytest.mark.parametrize("key", ["pard_token", "mask_token_id", "ptd_token_id"])
def test_the_names_of_the_mask_token(tmp_path: Path, target: Path, key: str) -> None:
    draft = make_checkpoint(tmp_path, "llama", name="draft")
    with pytest.raises(ConfigError, match="none of pard_token, mask_token_id, ptd_token_id"):
        opened(target, draft, "draft_model")
    edit_config(draft, **{key: MASK})
    opened(target, draft, "draft_model")


def says(**fields: Any) -> Callable[[Path], None]:
    """Return a change to a dflash_config with these fields, next to those that it needs."""
    return lambda folder: edit_config(
        folder, dflash_config={"target_layer_ids": [0, 1], "mask_token_id": MASK} | fields
    )


BAD_DFLASH: dict[str, Bad] = {
    "no DFlash draft": (
        lambda folder: edit_config(folder, architectures=["Qwen3ForCausalLM"]),
        UnsupportedError,
        ("'Qwen3ForCausalLM' is no DFlash draft",),
    ),
    "no layers": (says(target_layer_ids=None), CheckpointError, ("dflash_config.target_layer_ids", "not a list")),
    "no mask token": (says(mask_token_id=None), ConfigError, ("mode=DFLASH", "mask_token_id")),
    "layers past the end": (says(target_layer_ids=[0, 4]), ConfigError, ("capture_layers=(0, 4)", "4 layers")),
    "more layers than fc fuses": (
        says(target_layer_ids=[0, 1, 2]),
        WeightsError,
        ("fc.weight is (64, 128), expected (64, 192)",),
    ),
    "a causal block": (says(causal=True), UnsupportedError, ("dflash_config.causal", "only False is built")),
    "sinks": (says(attention_sink_bias=True), UnsupportedError, ("attention_sink_bias", "only False is built")),
    "sliding windows": (
        lambda folder: edit_config(folder, layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        UnsupportedError,
        ("sliding window",),
    ),
    "a vocabulary of its own": (
        lambda folder: edit_config(folder, draft_vocab_size=50),
        WeightsError,
        ("lm_head.weight (50, 64)",),
    ),
    "too many ids": (lambda folder: edit_config(folder, draft_vocab_size=500), CheckpointError, ("the 199 ids",)),
    "a block of one": (lambda folder: edit_config(folder, block_size=1), CheckpointError, ("no room for a mask",)),
    "short blocks": (lambda folder: edit_config(folder, block_size=K), ConfigError, (f"use at most {K - 1}",)),
    "for a deeper target": (
        lambda folder: edit_config(folder, num_target_layers=36),
        WeightsError,
        ("num_target_layers is 36, the target's is 4",),
    ),
    "an embedding of its own": (
        lambda folder: edit_tensors(folder, lambda them: them.update({"embed_tokens.weight": torch.zeros(199, 64)})),
        WeightsError,
        ("unexpected: embed_tokens.weight",),
    ),
    "a mask_hidden": (
        lambda folder: edit_tensors(folder, lambda them: them.update(mask_hidden=torch.zeros(64))),
        WeightsError,
        ("unexpected: mask_hidden",),
    ),
}


@pytest.mark.parametrize("what", BAD_DFLASH)
def test_a_bad_dflash_draft_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    change, error, words = BAD_DFLASH[what]
    draft = make_dflash(tmp_path, target, (0, 1), MASK)
    opened(target, draft, "dflash")
    change(draft)
    with pytest.raises(error) as caught:
        opened(target, draft, "dflash")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("backend", ["onnx", "tensorrt"])
def test_dflash_needs_a_tree_mask(tmp_path: Path, target: Path, backend: str) -> None:
    draft = make_dflash(tmp_path, target, (0, 1), MASK)
    config = SpeculativeConfig(method="dflash", model=str(draft), num_speculative_tokens=3)
    with pytest.raises(UnsupportedError, match=f"mode=DFLASH on backend {backend}: masks of a block see each other"):
        plan_build(target, config, EngineConfig(backend=backend, num_kv_blocks=8))
