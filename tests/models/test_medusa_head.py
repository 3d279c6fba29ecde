"""Medusa heads: the arithmetic of the paper, the state that they read, and the checkpoints that are refused.

The oracle is written from the paper's equations (Cai et al., arXiv 2401.10774) with plain torch operations over a
checkpoint's tensors. transformers computes the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint, oracle
from tests.e2e.head_cases import step_of
from tests.head_checkpoints import make_medusa
from tests.models.built_heads import head_of
from tests.models.state_heads import VOCAB, Bad, assert_drafts, assert_refused, change_config, change_tensors, no_attend
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError, WeightsError
from trtspec.models.decoder import Decoder
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import describe_decoder, load_decoder

HEADS = 4
SOME_IDS = [int(i) for i in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:83]]


@dataclass(frozen=True)
class Paper:
    """The published heads over a checkpoint's tensors, whose names this class reads independently of trtspec."""

    tensors: dict[str, Tensor]
    layers: int
    fasterdecoding: bool
    target_head: Tensor
    scale: float = 1.0

    def logits(self, h: Tensor, head: int) -> Tensor:
        """Logits of a head: h [n, H] -> [n, Vd]."""
        x = h
        for layer in range(self.layers):
            name = f"{head}.{layer}.linear" if self.fasterdecoding else f"blocks.{head}.layers.{layer}"
            x = x + F.silu(F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")))
        own = f"{head}.{self.layers}.weight" if self.fasterdecoding else f"lm_heads.{head}.weight"
        shared = self.tensors.get("lm_head.weight", self.tensors.get("lm_heads.0.weight", self.target_head))
        return x @ self.tensors.get(own, shared).T * self.scale


@dataclass(frozen=True)
class Variant:
    """A checkpoint: the fields with which it is made, and a function that renames its tensors."""

    fields: dict[str, Any] = field(default_factory=dict)
    rename: Callable[[str], str] = lambda name: name


SHARED = {"original_lm_head": True}
VARIANTS = {
    "vLLM's layout": Variant(),
    "biases": Variant({"bias": True}),
    "three blocks": Variant({"num_layers": 3}),
    "truncated vocabulary": Variant({"token_map": SOME_IDS}),
    "truncated in no way": Variant({"truncated_vocab_size": VOCAB}),
    "logits scaled": Variant({"logit_scale": 0.25}),
    "one lm_head for all": Variant({**SHARED, "num_lm_heads": 1}),
    "one lm_head by its own name": Variant(
        {**SHARED, "num_lm_heads": 1}, lambda name: name.replace("lm_heads.0", "lm_head")
    ),
    "the target's lm_head": Variant({**SHARED, "num_lm_heads": 0}),
    "FasterDecoding's layout": Variant({"fasterdecoding": True, "bias": True}),
    "FasterDecoding's, two blocks, no biases": Variant({"fasterdecoding": True, "num_layers": 2}),
    "prefix medusa_heads": Variant({"bias": True}, lambda name: f"medusa_heads.{name}"),
    "prefix medusa_head": Variant({"fasterdecoding": True, "bias": True}, lambda name: f"medusa_head.{name}"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("medusa"), "llama", name="target")


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(ModelConfig.from_folder(target), torch.float32)


def make(tmp_path: Path, target: Path, variant: Variant) -> tuple[Path, Paper]:
    folder = make_medusa(tmp_path, target, num_heads=HEADS, **variant.fields)
    fields = variant.fields
    paper = Paper(
        load_file(folder / "model.safetensors"),
        fields.get("num_layers", 1),
        fields.get("fasterdecoding", False),
        load_file(target / "model.safetensors")["lm_head.weight"],
        fields.get("logit_scale", 1.0),
    )
    edit_tensors(folder, lambda t: [t.update({variant.rename(name): t.pop(name)}) for name in [*t]])
    return folder, paper


@pytest.mark.parametrize("num_heads", [1, HEADS])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_head_is_that_of_the_paper(
    tmp_path: Path, target: Path, decoder: Decoder, name: str, num_heads: int
) -> None:
    """Every head that runs computes as in the paper; the other heads are not held in memory."""
    folder, paper = make(tmp_path, target, VARIANTS[name])
    head = head_of("medusa", folder, decoder, num_stages=num_heads)
    h = torch.randn(9, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    ids, positions = torch.arange(9), torch.arange(9)
    for step in range(num_heads):
        y = head(ids, h, positions, no_attend, step)
        assert torch.equal(y, h)  # the next head's input
        torch.testing.assert_close(head.logits(y, step), paper.logits(h, step), rtol=0.0, atol=1e-4)
    known = SOME_IDS if "token_map" in VARIANTS[name].fields else [*range(VOCAB)]
    assert head.target_ids.tolist() == known
    assert not any(parameter.isnan().any() for parameter in head.parameters())
    assert (head.kv_layers, head.training) == ((), False)
    held = {int(part) for key, _ in head.named_parameters() for part in key.split(".")[1:2]}
    assert held == set(range(num_heads))
    per_pass = [weight_bytes(head.blocks[i], head.heads[min(i, len(head.heads) - 1)]) for i in range(num_heads)]
    assert [head.weight_bytes_for(i) for i in range(num_heads + 1)] == [sum(per_pass[:i]) for i in range(num_heads + 1)]


@pytest.mark.parametrize("name", VARIANTS)
def test_described_as_it_is_loaded(tmp_path: Path, target: Path, decoder: Decoder, name: str) -> None:
    folder, _ = make(tmp_path, target, VARIANTS[name])
    described_decoder = describe_decoder(ModelConfig.from_folder(target), torch.float32)
    loaded, described = (head_of("medusa", folder, one, num_stages=3) for one in (decoder, described_decoder))
    shapes = [{key: p.shape for key, p in head.named_parameters()} for head in (loaded, described)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in [*described.parameters(), *described.buffers()])
    assert described.weight_bytes_for(3) == loaded.weight_bytes_for(3)
    (folder / "model.safetensors").unlink()
    # Without weights, the description cannot know of biases that config.json does not name.
    bare = head_of("medusa", folder, described_decoder, num_stages=3)
    assert len(bare.heads) == len(loaded.heads)
    assert bare.draft_ids.shape == loaded.draft_ids.shape


def test_lm_heads_with_rows_for_ids_that_are_left_out(tmp_path: Path, target: Path, decoder: Decoder) -> None:
    """Rows of lm_heads for ids outside token_map may be in the checkpoint; only the rows of token_map are loaded."""
    folder = make_medusa(tmp_path, target, num_heads=2)
    whole = load_file(folder / "model.safetensors")
    edit_tensors(folder, lambda t: t.update(token_map=torch.tensor(SOME_IDS)))
    edit_config(folder, truncated_vocab_size=len(SOME_IDS))
    head = head_of("medusa", folder, decoder, num_stages=2)
    for i in range(2):
        assert torch.equal(head.heads[i].weight, whole[f"lm_heads.{i}.weight"][SOME_IDS])


@pytest.mark.parametrize("name", ["vLLM's layout", "truncated vocabulary", "FasterDecoding's layout"])
def test_heads_read_the_state_of_the_last_token(tmp_path: Path, target: Path, name: str) -> None:
    """In an engine, greedy drafts are those of the paper's heads on transformers' last hidden state, after the norm."""
    folder, paper = make(tmp_path, target, VARIANTS[name])
    ids = SOME_IDS if "token_map" in VARIANTS[name].fields else [*range(VOCAB)]

    def chain(h: Tensor, token: int) -> list[int]:
        return [ids[int(paper.logits(h, head).argmax())] for head in range(HEADS)]

    assert_drafts(target, {"method": "medusa", "model": str(folder)}, HEADS, chain, oracle(target))


def test_a_head_computes_in_the_targets_dtype_and_may_be_quantised(tmp_path: Path, target: Path) -> None:
    folder = make_medusa(tmp_path, target, num_heads=2)
    whole = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2}
    sizes = []
    for fields in ({}, {"quantization": "int8"}):
        with LLM(target, {**whole, **fields}, dtype="bfloat16") as llm:
            head = step_of(llm).worker.get_submodule("head")
            assert {parameter.dtype for parameter in head.parameters()} == {torch.int8 if fields else torch.bfloat16}
            sizes.append(weight_bytes(head))
    assert sizes[1] < 0.6 * sizes[0]


BAD_HEADS: dict[str, Bad] = {
    "for another hidden size": (
        change_config(hidden_size=128),
        WeightsError,
        ("made for another target", "hidden_size is 128", "target's is 64"),
    ),
    "for another vocabulary": (
        change_config(vocab_size=300),
        WeightsError,
        ("made for another target", "vocab_size is 300", "target's is 199"),
    ),
    "more heads than there are": (
        change_config(num_heads=5),
        WeightsError,
        ("missing: blocks.4.layers.0.weight (64, 64), lm_heads.4.weight (199, 64)",),
    ),
    "fewer heads than there are": (
        change_config(num_heads=3),
        WeightsError,
        ("unexpected: blocks.3.layers.0.weight, lm_heads.3.weight",),
    ),
    "a block that is not there": (
        change_config(num_hidden_layers=2),
        WeightsError,
        ("missing: blocks.0.layers.1.weight (64, 64)",),
    ),
    "a bias that it does not say": (
        change_tensors(lambda t: t.update({"blocks.1.layers.0.bias": torch.zeros(64)})),
        WeightsError,
        ("unexpected: blocks.1.layers.0.bias",),
    ),
    "a bias too few": (
        lambda folder: (
            change_config(medusa_fc_bias=None)(folder),
            change_tensors(lambda t: t.update({"blocks.1.layers.0.bias": torch.zeros(64)}))(folder),
        ),
        WeightsError,
        ("missing: blocks.0.layers.0.bias (64,)",),
    ),
    "another shape, in a head that does not run": (
        change_tensors(lambda t: t.update({"lm_heads.3.weight": torch.zeros(198, 64)})),
        WeightsError,
        ("lm_heads.3.weight is (198, 64), expected (199, 64)",),
    ),
    "a tensor under two names": (
        change_tensors(lambda t: t.update({"0.1.weight": t["lm_heads.0.weight"].clone()})),
        WeightsError,
        ("lm_heads.0.weight is there twice",),
    ),
    "one lm_head where there should be four": (
        change_config(original_lm_head=True),
        WeightsError,
        ("unexpected: lm_heads.1.weight, lm_heads.2.weight, lm_heads.3.weight",),
    ),
    "no token_map": (
        change_config(truncated_vocab_size=83),
        WeightsError,
        ("token_map is missing, expected (83,)", "83", "199"),
    ),
    "a token_map for all ids": (
        change_tensors(lambda t: t.update(token_map=torch.arange(VOCAB))),
        WeightsError,
        ("unexpected: token_map",),
    ),
    "a token_map that repeats": (
        lambda folder: (
            change_config(truncated_vocab_size=3)(folder),
            change_tensors(lambda t: t.update(token_map=torch.tensor([1, 2, 1])))(folder),
        ),
        WeightsError,
        ("token_map must hold different ids", "0..198"),
    ),
    "a token_map past the end": (
        lambda folder: (
            change_config(truncated_vocab_size=3)(folder),
            change_tensors(lambda t: t.update(token_map=torch.tensor([1, 2, 199])))(folder),
        ),
        WeightsError,
        ("token_map must hold different ids", "0..198"),
    ),
    "a vocabulary larger than the target's": (
        change_config(truncated_vocab_size=200),
        WeightsError,
        ("truncated_vocab_size is 200", "199"),
    ),
    "no heads": (change_config(num_heads=0), CheckpointError, ("'num_heads' = 0 must be at least 1",)),
    "another kind": (
        change_config(model_type="llama"),
        UnsupportedError,
        ("model_type 'llama' is no set of Medusa heads", "'medusa'", "leave method unset"),
    ),
    "quantised": (
        change_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        UnsupportedError,
        ("quantised weights (gptq", "quantization in speculative_config"),
    ),
    "pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt"),
        UnsupportedError,
        ("medusa_lm_head.pt", "safetensors.torch.save_file"),
    ),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_a_bad_head_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    folder = make_medusa(tmp_path, target, num_heads=HEADS)
    assert_refused(target, {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2}, BAD_HEADS[what])


def test_no_more_drafts_than_heads(tmp_path: Path, target: Path) -> None:
    folder = make_medusa(tmp_path, target, num_heads=HEADS)
    wishes = {"method": "medusa", "model": str(folder)}
    with LLM(target, wishes) as llm:
        assert llm.engine.loop.proposer.speculation.num_speculative_tokens == HEADS
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8 exceeds the 4 heads .*use at most 4"):
        LLM(target, {**wishes, "num_speculative_tokens": 8})  # a multiple, which MTP layers allow


@pytest.mark.parametrize("fasterdecoding", [False, True])
def test_heads_are_known_by_their_config(tmp_path: Path, target: Path, fasterdecoding: bool) -> None:
    """Medusa heads are recognised by their config.json, whatever the name of the folder."""
    folder = make_medusa(tmp_path, target, name="eagle-or-not", num_heads=2, fasterdecoding=fasterdecoding)
    with LLM(target, {"model": str(folder), "num_speculative_tokens": 2}) as llm:
        assert llm.engine.loop.proposer.speculation.mode.name == "MEDUSA"
        assert llm.engine.loop.proposer.speculation.capture_layers == (-1,)
