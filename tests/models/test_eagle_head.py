"""Heads of the original EAGLE: the arithmetic of the paper, the contents of checkpoints, and layouts of configs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.head_checkpoints import make_eagle
from tests.models import eagle_heads
from tests.models.built_heads import head_of
from tests.models.eagle_heads import EAGLE
from tests.models.paper_heads import VOCAB, K, PaperHead, assert_every_pass_is_that_of_the_paper
from tests.models.test_describing import assert_described, without_weights
from trtspec import LLM
from trtspec.backends.eager import EagerExecutable
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.engine.stats import TimedExecutable
from trtspec.errors import WeightsError
from trtspec.methods.eagle.head import EagleHead
from trtspec.methods.eagle.weights import EagleWeights
from trtspec.methods.head_drafter import HeadDrafter
from trtspec.methods.step import HeadStep, OneEngineStep
from trtspec.methods.worker import SpecWorker
from trtspec.models.decoder import Decoder
from trtspec.models.layers import RMSNorm
from trtspec.models.weights import describe_decoder, load_decoder, same_tensor, tensors_of

target = eagle_heads.target


class PaperEagle(PaperHead):
    """EAGLE as published (Li et al., arXiv 2401.15077).

    It fuses the token and the feature of a position. Decoder layers predict the next feature, and the target's own
    lm_head reads it.
    """

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        x = self.linear(torch.cat((e, h), dim=-1), "fc")
        window = self.config["sliding_window"] if self.config["model_type"] == "mistral" else None
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            x = x + self.attention(self.norm(x, f"{prefix}input_layernorm") if layer else x, prefix, window)
            x = x + self.mlp(self.norm(x, f"{prefix}post_attention_layernorm"), prefix)
        return x

    def logits(self, y: Tensor) -> Tensor:
        return y @ self.lm_head.T


@dataclass(frozen=True)
class Variant:
    """A target and its head."""

    arch: str = "llama"
    target: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "one layer": Variant(),
    "a bias of fc": Variant(head={"fc_bias": True}),
    "two layers": Variant(head={"num_hidden_layers": 2}),
    "tied target": Variant(target={"tie_word_embeddings": True}),
    "own embedding": Variant(head={"embedding": "own"}),
    "own lm_head": Variant(head={"head": "own"}),
    "both own, tied target": Variant(target={"tie_word_embeddings": True}, head={"embedding": "own", "head": "own"}),
    "copies": Variant(head={"embedding": "copied", "head": "copied"}),
    "biases": Variant(head={"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
    "one KV head, a narrow MLP": Variant(head={"num_key_value_heads": 1, "intermediate_size": 48}),
    "llama3 rope": Variant("llama31"),
    "a window": Variant("mistral_swa", head={"model_type": "mistral", "architectures": ["MistralForCausalLM"]}),
    "qwen3": Variant("qwen3", head={"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "qk_norm": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_pass_is_that_of_the_paper(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    target = make_checkpoint(tmp_path, variant.arch, initializer_range=0.06, name="target", **variant.target)
    folder = make_eagle(tmp_path, target, **variant.head)
    assert_every_pass_is_that_of_the_paper(
        target,
        lambda decoder: head_of("eagle", folder, decoder, target),
        lambda theirs: PaperEagle(folder, theirs),
        (-1,),
    )


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(ModelConfig.from_folder(target), torch.float32)


def prefixed(tensors: dict[str, Tensor]) -> None:
    for name in [*tensors]:
        tensors[f"model.{name}"] = tensors.pop(name)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_every_tensor_lands_where_it_belongs(
    tmp_path: Path, target: Path, decoder: Decoder, prefix: bool, biases: bool
) -> None:
    """Loaded tensors, under public names again, equal those in the file.

    Biases that config.json does not name, as in heads for Qwen2, are loaded.
    """
    own = {"embedding": "own", "head": "own"}
    folder = make_eagle(tmp_path, target, num_hidden_layers=2, fc_bias=biases, attention_bias=biases, **own)
    saved = load_file(folder / "model.safetensors")
    edit_config(folder, attention_bias=False)
    if prefix:
        edit_tensors(folder, prefixed)
    head = head_of("eagle", folder, decoder, target)
    ours = tensors_of(head, EagleWeights.slots(head.spec))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    assert not any(parameter.isnan().any() for parameter in head.parameters())
    assert not head.training
    assert [isinstance(layer.attention_norm, RMSNorm) for layer in head.layers] == [False, True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["absent", "copied", "own"])
@pytest.mark.parametrize("prefix", [False, True])
def test_what_is_the_targets_is_held_once(tmp_path: Path, kind: str, tied: bool, prefix: bool) -> None:
    """The head uses the very same modules as the target, unless the file has values of its own."""
    target = make_checkpoint(tmp_path, "llama", tie_word_embeddings=tied, dtype="bfloat16")
    folder = make_eagle(tmp_path, target, embedding=kind, head=kind)
    if prefix:
        edit_tensors(folder, prefixed)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.bfloat16)
    head = head_of("eagle", folder, decoder, target)
    shared = kind != "own"
    assert (head.embedding is decoder.embedding) == (head.head is decoder.head) == shared
    assert (head.spec.own_embedding, head.spec.own_head) == (not shared, not shared)


def test_a_copy_that_differs_in_one_value_is_its_own(tmp_path: Path, target: Path, decoder: Decoder) -> None:
    folder = make_eagle(tmp_path, target, embedding="copied", head="copied")
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1))
    head = head_of("eagle", folder, decoder, target)
    assert (head.spec.own_embedding, head.spec.own_head) == (False, True)


def test_tensors_of_many_rows_are_compared_to_the_last(tmp_path: Path) -> None:
    one = torch.arange(3000 * 2).view(3000, 2).float()
    other = one.clone()
    other[-1, 1] += 0.25
    for name, tensors in (("a", {"x": one, "longer": torch.cat((one, one))}), ("b", {"x": one, "y": other})):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")

    def same(mine: str, theirs: str, dtype: torch.dtype = torch.float32) -> bool:
        return same_tensor((tmp_path / "a", mine, "draft"), (tmp_path / "b", theirs, "target"), dtype)

    assert same("x", "x")
    assert not same("x", "y")
    assert same("x", "y", torch.bfloat16)  # 5999 and 5999.25 are equal in bfloat16
    assert not same("longer", "x")
    assert not same("x", "missing")
    assert not same("missing", "x")
    assert not same("missing", "missing")


@pytest.mark.parametrize("kind", ["absent", "copied", "own"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_head_is_described_as_it_is_loaded(tmp_path: Path, arch: str, kind: str) -> None:
    target = ModelConfig.from_folder(make_checkpoint(tmp_path, arch))
    folder = make_eagle(tmp_path, target.path, embedding=kind, head=kind, fc_bias=True, num_hidden_layers=2)
    decoder, bare = load_decoder(target, torch.float32), describe_decoder(target, torch.float32)
    made = head_of("eagle", folder, decoder, target.path)
    places = [folder] if kind == "own" else [folder, without_weights(folder, "bare")]
    for there in places:
        described = head_of("eagle", there, bare, target.path)
        assert_described(described, made)
        assert (described.embedding is bare.embedding) == (described.head is bare.head) == (kind != "own")
        assert described.kv_layers == made.kv_layers
        assert described.weight_bytes_for(3) == made.weight_bytes_for(3)


@pytest.mark.parametrize(
    ("says", "bias"),
    [({}, True), ({"bias": True}, True), ({"bias": False}, False), ({"bias": True, "eagle_fc_bias": False}, False)],
)
def test_what_config_says_of_fc_counts_where_there_are_no_weights(
    tmp_path: Path, target: Path, says: dict[str, bool], bias: bool
) -> None:
    folder = without_weights(make_eagle(tmp_path, target, **says), "bare")
    head = head_of("eagle", folder, describe_decoder(ModelConfig.from_folder(target), torch.float32), target)
    assert head.spec.fc_bias is bias


def test_nothing_is_compared_with_a_target_that_has_no_weights(tmp_path: Path, target: Path) -> None:
    folder = make_eagle(tmp_path, target, embedding="copied")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(target / "config.json", bare / "config.json")
    head = head_of("eagle", folder, describe_decoder(ModelConfig.from_folder(bare), torch.float32), bare)
    assert not head.spec.own_embedding


def test_weight_bytes_count_each_pass(tmp_path: Path, target: Path, decoder: Decoder) -> None:
    """A step counts all weights but the embedding in each of the K passes, including the target's lm_head."""
    folder = make_eagle(tmp_path, target, embedding="own", num_hidden_layers=2)
    head, tensors = head_of("eagle", folder, decoder, target), load_file(folder / "model.safetensors")
    own = sum(tensor.nbytes for name, tensor in tensors.items() if name != "embed_tokens.weight")
    assert head.weight_bytes_for(K) == K * (own + VOCAB * 64 * 4)


# -- in an engine --------------------------------------------------------------------------------------------------


def step_of(llm: LLM) -> OneEngineStep | HeadStep:
    drafter = llm.engine.loop.proposer.drafter
    timed = drafter.head if isinstance(drafter, HeadDrafter) else llm.engine.loop.target
    assert isinstance(timed, TimedExecutable)
    assert isinstance(timed.inner, EagerExecutable)
    assert isinstance(timed.inner.step, OneEngineStep | HeadStep)
    return timed.inner.step


SAYS: dict[str, dict[str, Any]] = {
    "a plain decoder": {},
    "an EAGLE head": {"architectures": ["EagleLlamaForCausalLM"]},
    "a wrapped decoder": {"wrapped": True},
    "a wrapped EAGLE head": {"wrapped": True, "architectures": ["EagleLlamaForCausalLM"]},
}


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("name", ["head", "EAGLE-for-this"])
def test_method_from_a_heads_config_and_name(tmp_path: Path, target: Path, says: str, name: str) -> None:
    """The method follows from the folder's name, as in vLLM, or from the architecture, unless it is a decoder's."""
    folder = make_eagle(tmp_path, target, name=name, **SAYS[says])
    if (says, name) == ("a plain decoder", "head"):
        with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight .* unexpected: fc\.weight"):
            LLM(target, {"model": str(folder), "num_speculative_tokens": K})
        return
    with LLM(target, {"model": str(folder), "num_speculative_tokens": K}) as llm:
        worker = step_of(llm).worker
        assert isinstance(worker, SpecWorker)
        assert isinstance(worker.head, EagleHead)
        assert worker.capture_layers == (-1,)


def test_what_stands_next_to_a_wrapped_config_wins(tmp_path: Path, target: Path) -> None:
    folder = make_eagle(tmp_path, target, wrapped=True, rms_norm_eps=0.5)
    edit_config(folder, rms_norm_eps=0.25, truncated_vocab_size=VOCAB, architectures=["EAGLEModel"], rope_theta=None)
    config = ModelConfig.from_folder(folder, "draft")
    assert config.rms_norm_eps == 0.25
    assert (config.architecture, config.model_type) == ("EagleLlamaForCausalLM", "llama")
    assert config.raw["truncated_vocab_size"] == VOCAB


@pytest.mark.parametrize("one_engine", [None, True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_computes_in_the_targets_dtype(
    tmp_path: Path, target: Path, one_engine: bool | None, dtype: str
) -> None:
    """A head computes in the target's dtype and has as many KV layers as decoder layers."""
    folder = make_eagle(tmp_path, target, num_hidden_layers=2)
    wishes = {**EAGLE, "model": str(folder), "one_engine": one_engine}
    with LLM(target, wishes, dtype=dtype, num_kv_blocks=9) as llm:
        step = step_of(llm)
        mode = llm.engine.loop.input_builder.mode
        assert mode.name == ("EAGLE" if one_engine is False else "EAGLE_ONE_MODEL")
        assert {parameter.dtype for parameter in step.worker.parameters()} == {getattr(torch, dtype)}
        assert len(step.kv_layers) == (2 if one_engine is False else 3 + 2)


@pytest.mark.parametrize("one_engine", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_shared_is_the_packed_target(tmp_path: Path, one_engine: bool, tied: bool) -> None:
    target = make_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    folder = make_eagle(tmp_path, target, embedding="copied")
    wishes = {**EAGLE, "model": str(folder), "one_engine": one_engine, "quantization": "int8"}
    with LLM(target, wishes, num_kv_blocks=9) as llm:
        worker, timed = step_of(llm).worker, llm.engine.loop.target
        assert isinstance(worker, SpecWorker)
        assert isinstance(timed, TimedExecutable)
        assert isinstance(timed.inner, EagerExecutable)
        owner: Any = timed.inner.step
        assert worker.head.embedding is owner.decoder.embedding
        assert worker.head.head is owner.decoder.head
        assert owner.decoder.head.weight.dtype == torch.float32
        assert worker.head.fc.weight.dtype == torch.int8
