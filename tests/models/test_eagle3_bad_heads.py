"""EAGLE3 heads that are refused: damaged checkpoints, contradictory configs, and impossible layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.head_checkpoints import make_eagle3
from tests.models import eagle3_heads
from tests.models.eagle3_heads import Tensors, build_step
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError

deep = eagle3_heads.deep
head = eagle3_heads.head


def change_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def change_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def d2t(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update(d2t=change(tensors["d2t"])))


def with_first(value: int) -> Callable[[Tensor], Tensor]:
    return lambda offsets: torch.cat((torch.tensor([value]), offsets[1:]))


Bad = tuple[Callable[[Path], None], type[TrtSpecError], tuple[str, ...]]

BAD_HEADS: dict[str, Bad] = {
    "another speculator": (
        change_config(speculators_model_type="xpress", architectures=["XpressDraftModel"]),
        UnsupportedError,
        ("'XpressDraftModel' is no EAGLE3 head we run", "LlamaForCausalLMEagle3"),
    ),
    "a speculator without its layer": (
        change_config(speculators_model_type="eagle3"),
        CheckpointError,
        ("'transformer_layer_config' is missing",),
    ),
    "a speculator with a layer of another kind": (
        change_config(speculators_model_type="eagle3", transformer_layer_config={"model_type": "gemma3"}),
        UnsupportedError,
        ("'transformer_layer_config.model_type' = \"gemma3\"", "llama, qwen3"),
    ),
    "for another hidden size": (
        change_config(target_hidden_size=128),
        WeightsError,
        ("target_hidden_size", "128", "target's is 64", "head trained for this target"),
    ),
    "for another hidden size, not said": (
        change_config(target_hidden_size=None, hidden_size=128),
        WeightsError,
        ("hidden_size", "128", "target's is 64"),
    ),
    "for another vocabulary": (
        change_config(vocab_size=300),
        WeightsError,
        ("vocab_size", "300", "target's is 199", "head trained for this target"),
    ),
    "two layers": (change_config(num_hidden_layers=2), UnsupportedError, ("num_hidden_layers = 2", "one layer")),
    "a layer past the target's end": (
        change_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}),
        ConfigError,
        ("capture_layers=(1, 4, 8)", "8 layers", "head trained for this target", "[-1, 7]"),
    ),
    "the embedding as a layer": (
        change_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 5, 8]}),
        CheckpointError,
        ("eagle_aux_hidden_state_layer_ids", "[0, 5, 8]", "embedding", ">= 1"),
    ),
    "layers of the wrong type": (
        change_config(eagle_config={"eagle_aux_hidden_state_layer_ids": "2,5"}),
        CheckpointError,
        ("eagle_aux_hidden_state_layer_ids = '2,5'", "list of layer numbers"),
    ),
    "eagle_config of the wrong type": (
        change_config(eagle_config=[1]),
        CheckpointError,
        ("eagle_config", "not an object"),
    ),
    "fewer layers than fc fuses": (
        change_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5]}),
        WeightsError,
        ("fc.weight is (64, 192)", "expected (64, 128)", "fuses 3", "2 hidden states are captured", "capture_layers"),
    ),
    "fc that fuses more": (
        change_tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 256)})),
        WeightsError,
        ("fc.weight is (64, 256)", "expected (64, 192)", "fuses 4", "3 hidden states are captured", "capture_layers"),
    ),
    "fc of no multiple": (
        change_tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 100)})),
        WeightsError,
        ("fc.weight is (64, 100)", "expected (64, 192)"),
    ),
    "no fc": (
        change_tensors(lambda t: t.pop("fc.weight")),
        WeightsError,
        ("missing: fc.weight (64, 192)",),
    ),
    "no hidden_norm, an extra bias, a short norm": (
        change_tensors(
            lambda t: (
                t.pop("midlayer.hidden_norm.weight"),
                t.update({"midlayer.mlp.up_proj.bias": torch.zeros(128), "norm.weight": torch.zeros(32)}),
            )
        ),
        WeightsError,
        (
            "missing: midlayer.hidden_norm.weight (64,)",
            "unexpected: midlayer.mlp.up_proj.bias",
            "norm.weight is (32,), expected (64,)",
        ),
    ),
    "q, k, v as wide as the hidden states": (
        change_tensors(lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)})),
        WeightsError,
        ("midlayer.self_attn.q_proj.weight is (64, 64), expected (64, 128)",),
    ),
    "a second layer": (
        change_tensors(lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(128, 64)})),
        WeightsError,
        ("unexpected: layers.1.mlp.up_proj.weight",),
    ),
    "a tensor under two names": (
        change_tensors(lambda t: t.update({"layers.0.hidden_norm.weight": torch.zeros(64)})),
        WeightsError,
        ("midlayer.hidden_norm.weight", "twice"),
    ),
    "another lm_head than it says": (
        change_config(draft_vocab_size=90),
        WeightsError,
        ("lm_head.weight is (83, 64), expected (90, 64)",),
    ),
    "no lm_head for a vocabulary of its own": (
        change_tensors(lambda t: t.pop("lm_head.weight")),
        WeightsError,
        ("missing: lm_head.weight (83, 64)",),
    ),
    "a draft vocabulary larger than the target's": (
        change_config(draft_vocab_size=200),
        CheckpointError,
        ("draft_vocab_size = 200", "vocab_size = 199"),
    ),
    "a draft vocabulary of no size": (
        change_config(draft_vocab_size="83"),
        CheckpointError,
        ("draft_vocab_size = '83'", "no size"),
    ),
    "norm_before_residual of the wrong type": (
        change_config(norm_before_residual="yes"),
        CheckpointError,
        ("norm_before_residual = 'yes'", "true or false"),
    ),
    "no d2t": (
        change_tensors(lambda t: t.pop("d2t")),
        WeightsError,
        ("d2t (83,) is missing", "83", "199"),
    ),
    "d2t past the end": (
        d2t(with_first(199)),
        WeightsError,
        ("d2t[0] = 199", "199", "0..198", "offsets"),
    ),
    "d2t below 0": (d2t(with_first(-1)), WeightsError, ("d2t[0] = -1", "0..198")),
    "d2t that holds ids": (
        d2t(lambda offsets: offsets + torch.arange(len(offsets))),
        WeightsError,
        ("d2t", "offsets (target id - draft id)"),
    ),
    "d2t not one to one": (
        both(d2t(lambda offsets: torch.zeros_like(offsets)), d2t(with_first(1))),
        WeightsError,
        ("d2t", "draft ids 0 and 1", "same target id 1", "one to one"),
    ),
    "d2t of another length": (d2t(lambda offsets: offsets[:-1]), WeightsError, ("d2t is (82,)", "expected (83,)")),
    "d2t of two dimensions": (
        d2t(lambda offsets: offsets[:, None]),
        WeightsError,
        ("d2t is (83, 1)", "expected (83,)"),
    ),
    "d2t of floats": (d2t(lambda offsets: offsets.float()), WeightsError, ("d2t is (83,) torch.float32", "integers")),
    "t2d that disagrees": (
        change_tensors(lambda t: t.update(t2d=~t["t2d"])),
        WeightsError,
        ("t2d and d2t", "different tokens"),
    ),
    "t2d of another length": (
        change_tensors(lambda t: t.update(t2d=t["t2d"][:-1])),
        WeightsError,
        ("t2d is (198,)", "expected (199,)"),
    ),
    "no EAGLE3 head": (
        change_config(architectures=["LlamaForCausalLM"]),
        UnsupportedError,
        ("'LlamaForCausalLM' is no EAGLE3 head", "LlamaForCausalLMEagle3"),
    ),
    "a switch that is not built": (
        change_config(eagle_config={"use_last_layernorm": False}),
        UnsupportedError,
        ("eagle_config.use_last_layernorm = False", "not built", "True"),
    ),
    "no config": (
        lambda folder: (folder / "config.json").write_text("{}"),
        CheckpointError,
        ("config.json", "is missing"),
    ),
    "damaged weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
        CheckpointError,
        ("model.safetensors is damaged", "again"),
    ),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_a_bad_head_is_an_error_that_helps(deep: Path, head: Path, what: str) -> None:
    """The error is typed; its message names the model, the field or tensor, and the expected value."""
    change, error, words = BAD_HEADS[what]
    change(head)
    with pytest.raises(error) as caught:
        build_step(deep, head)
    message = str(caught.value)
    missing = [word for word in (*words, "draft", str(head)) if word not in message]
    assert not missing, message


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"capture_layers": (1, 3, 8)}, ("capture_layers=(1, 3, 8)", "8 layers", "[-1, 7]")),
        ({"capture_layers": (1, 3)}, ("fc.weight is (64, 192)", "expected (64, 128)", "2 hidden states")),
        ({"capture_layers": ()}, ("fc.weight is (64, 192)", "0 hidden states are captured", "set capture_layers")),
        ({"capture_layers": (-2, 1, 3)}, ("capture_layers",)),
    ],
)
def test_layers_that_the_user_cannot_mean(
    deep: Path, head: Path, wishes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises((ConfigError, WeightsError)) as caught:
        build_step(deep, head, **wishes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_shallow_target_needs_layers_to_be_named(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "llama", name="target", num_hidden_layers=3)
    head = make_eagle3(tmp_path, target)
    with pytest.raises(ConfigError, match=r"num_hidden_layers=3 is too few .*; set capture_layers"):
        build_step(target, head)
    assert build_step(target, head, capture_layers=(0, 1, 2)).worker.capture_layers == (0, 1, 2)
