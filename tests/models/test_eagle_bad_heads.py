"""Heads of the original EAGLE that are refused: damaged checkpoints, and configs that contradict the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.checkpoints import edit_config
from tests.head_checkpoints import make_eagle
from tests.models import eagle_heads
from tests.models.eagle_heads import EAGLE, config, tensors
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError

target = eagle_heads.target


Bad = tuple[Callable[[Path], None], type[TrtSpecError], tuple[str, ...]]

BAD_HEADS: dict[str, Bad] = {
    "for another hidden size": (
        config(hidden_size=128),
        WeightsError,
        ("hidden_size", "128", "target's is 64", "head trained for this target"),
    ),
    "for another vocabulary": (
        config(vocab_size=300),
        WeightsError,
        ("vocab_size", "300", "target's is 199", "head trained for this target"),
    ),
    "no fc": (tensors(lambda t: t.pop("fc.weight")), WeightsError, ("missing: fc.weight (64, 128)",)),
    "fc of hidden states alone": (
        tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 64)})),
        WeightsError,
        ("fc.weight is (64, 64), expected (64, 128)",),
    ),
    "a bias of fc that is promised": (config(bias=True), WeightsError, ("missing: fc.bias (64,)",)),
    "a bias of fc of another size": (
        tensors(lambda t: t.update({"fc.bias": torch.zeros(128)})),
        WeightsError,
        ("fc.bias is (128,), expected (64,)",),
    ),
    "a first layer with a norm, a last norm": (
        tensors(
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.zeros(64), "norm.weight": torch.zeros(64)})
        ),
        WeightsError,
        ("unexpected: layers.0.input_layernorm.weight, norm.weight",),
    ),
    "a second layer that config.json does not speak of": (
        tensors(lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(128, 64)})),
        WeightsError,
        ("unexpected: layers.1.mlp.up_proj.weight",),
    ),
    "a second layer that is not there": (
        config(num_hidden_layers=2),
        WeightsError,
        ("missing: layers.1.input_layernorm.weight (64,)", "layers.1.self_attn.k_proj.weight (32, 64)"),
    ),
    "a bias of q alone": (
        tensors(lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        WeightsError,
        ("missing: layers.0.self_attn.k_proj.bias (32,), layers.0.self_attn.v_proj.bias (32,)",),
    ),
    "an embedding of another vocabulary": (
        tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(198, 64)})),
        WeightsError,
        ("embed_tokens.weight is (198, 64), expected (199, 64)",),
    ),
    "an lm_head of a smaller vocabulary": (
        tensors(lambda t: t.update({"lm_head.weight": torch.zeros(83, 64)})),
        WeightsError,
        ("lm_head.weight is (83, 64), expected (199, 64)",),
    ),
    "a tensor under two names": (
        tensors(lambda t: t.update({"model.fc.weight": torch.zeros(64, 128)})),
        WeightsError,
        ("fc.weight is there twice",),
    ),
    "a vocabulary that is cut": (
        config(truncated_vocab_size=83),
        UnsupportedError,
        ("truncated_vocab_size = 83 is not built", "only 199 is"),
    ),
    "scaled logits": (config(logit_scale=0.5), UnsupportedError, ("logit_scale = 0.5 is not built", "only 1 is")),
    "a switch of the wrong type": (
        config(eagle_fc_bias="yes"),
        CheckpointError,
        ("eagle_fc_bias = 'yes'", "true or false"),
    ),
    "another architecture": (
        config(architectures=["MixtralForCausalLM"]),
        UnsupportedError,
        ("'MixtralForCausalLM' is no EAGLE head", "LlamaForCausalLM"),
    ),
    "an EAGLE3 head": (
        config(architectures=["LlamaForCausalLMEagle3"]),
        UnsupportedError,
        ("'LlamaForCausalLMEagle3' is an EAGLE3 head", "method='eagle3'"),
    ),
    "an EAGLE3 head that does not run": (
        config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        UnsupportedError,
        ("'Eagle3DeepseekV2ForCausalLM' is an EAGLE3 head", "method='eagle3'"),
    ),
    "weights that are not quantised as it says": (
        config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        WeightsError,
        ("missing: fc.qweight", "unexpected: fc.weight"),
    ),
    "a wrapper around nothing": (
        config(model_type="eagle"),
        CheckpointError,
        ("'model' is missing", "model_type 'eagle'"),
    ),
    "a wrapper around a name": (
        config(model_type="eagle", model="llama"),
        CheckpointError,
        ("'model' = \"llama\" is not an object",),
    ),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        UnsupportedError,
        ("pytorch_model.bin", "can run code", "safetensors.torch.save_file"),
    ),
    "damaged weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
        CheckpointError,
        ("model.safetensors is damaged", "again"),
    ),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_a_bad_head_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    """The error is typed; its message names the model, the field or tensor, and the expected value.

    It is the same whether the head is loaded or described, inside the target or next to it.
    """
    folder = make_eagle(tmp_path, target)
    change, error, words = BAD_HEADS[what]
    change(folder)
    said = []
    for one_engine in (True, False):
        with (
            mock.patch("trtspec.build.wiring.load_plugins", return_value={}),
            pytest.raises(error) as caught,
        ):
            LLM(target, {**EAGLE, "model": str(folder), "one_engine": one_engine}, num_kv_blocks=9)
        said.append(str(caught.value))
    missing = [word for word in (*words, "draft", str(folder)) if word not in said[0]]
    assert not missing, said[0]
    assert said[0] == said[1]


def test_layers_are_not_for_the_user_to_choose(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"capture_layers=\(1,\) means nothing to method='eagle'"):
        LLM(target, {**EAGLE, "model": str(make_eagle(tmp_path, target)), "capture_layers": (1,)})


def test_a_wrapped_config_is_read_where_it_is_wrapped(tmp_path: Path, target: Path) -> None:
    """Errors name the wrong field."""
    folder = make_eagle(tmp_path, target, wrapped=True)
    inner = json.loads((folder / "config.json").read_text())["model"]
    edit_config(folder, model={**inner, "num_attention_heads": "four"})
    with pytest.raises(CheckpointError, match=r"num_attention_heads' = \"four\" is not an integer"):
        ModelConfig.from_folder(folder, "draft")
