"""MLP speculators: the arithmetic of the paper, the state and tokens that they read, and refused checkpoints.

The oracle is written from the paper's equations (Wertheimer et al., arXiv 2404.19124) with plain torch operations over
a checkpoint's tensors. transformers computes the target's hidden states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_tensors, make_checkpoint, oracle
from tests.head_checkpoints import make_mlp_speculator
from tests.models.built_heads import head_of
from tests.models.state_heads import VOCAB, Bad, assert_drafts, assert_refused, change_config, change_tensors, no_attend
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError, WeightsError
from trtspec.models.decoder import Decoder
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import describe_decoder, load_decoder

STAGES = 4


@dataclass(frozen=True)
class Paper:
    """The published stages over a checkpoint's tensors; n, inner: n_predict and inner size."""

    tensors: dict[str, Tensor]
    n: int
    inner: int
    tied: bool
    scale_input: bool

    def tensor(self, part: str, stage: int, kind: str = "weight") -> Tensor:
        shared = min(stage, 1) if part == "proj" else 0
        return self.tensors[f"speculator.{part}.{shared if self.tied else stage}.{kind}"]

    def stage(self, i: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run stage i: state [n, H or inner], tokens [n] -> the next state [n, inner], logits [n, V]."""
        if i == 0 and self.scale_input:
            state = normed(state) / math.sqrt(2)
        state_weight = 0.5 ** (0.5 / self.n)
        emb_weight = math.sqrt((1 - state_weight**2) * (self.inner / 2))
        z = state @ self.tensor("proj", i).T + emb_weight / state_weight * self.tensor("emb", i)[tokens]
        state = F.gelu(normed(z) * self.tensor("ln", i) + self.tensor("ln", i, "bias"))
        return state, state @ self.tensor("head", i).T


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "as wide as the target": {},
    "narrower": {"inner_dim": 24},
    "wider": {"inner_dim": 96},
    "input scaled": {"scale_input": True, "inner_dim": 24},
    "tied": {"tie_weights": True},
    "tied, input scaled, narrower": {"tie_weights": True, "scale_input": True, "inner_dim": 24},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mlp"), "llama", name="target")


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(ModelConfig.from_folder(target), torch.float32)


def make(tmp_path: Path, target: Path, name: str) -> tuple[Path, Paper]:
    fields = VARIANTS[name]
    folder = make_mlp_speculator(tmp_path, target, n_predict=STAGES, **fields)
    paper = Paper(
        load_file(folder / "model.safetensors"),
        STAGES,
        fields.get("inner_dim", 64),
        fields.get("tie_weights", False),
        fields.get("scale_input", False),
    )
    return folder, paper


@pytest.mark.parametrize("num_stages", [1, 2, STAGES])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_stage_is_that_of_the_paper(
    tmp_path: Path, target: Path, decoder: Decoder, name: str, num_stages: int
) -> None:
    """Every stage that runs computes as in the paper; the other stages are not held in memory.

    Stages are scaled by the number of stages that were trained.
    """
    folder, paper = make(tmp_path, target, name)
    head = head_of("mlp_speculator", folder, decoder, num_stages=num_stages)
    generator = torch.Generator().manual_seed(1)
    ours = theirs = torch.randn(9, decoder.spec.hidden_size, generator=generator)
    for step in range(num_stages):
        tokens = torch.randint(VOCAB, (9,), generator=generator)
        ours = head(tokens, ours, torch.arange(9), no_attend, step)
        theirs, logits = paper.stage(step, theirs, tokens)
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)
        torch.testing.assert_close(head.logits(ours, step), logits, rtol=0.0, atol=1e-4)
    assert not any(parameter.isnan().any() for parameter in head.parameters())
    assert (head.kv_layers, head.training) == ((), False)
    held = {int(key.split(".")[1]) for key, _ in head.named_parameters()}
    assert held == set(range(min(num_stages, 2) if paper.tied else num_stages))
    per_pass = [
        sum(paper.tensor(part, i).nbytes for part in ("proj", "head", "ln")) + paper.tensor("ln", i, "bias").nbytes
        for i in range(num_stages)
    ]
    assert [head.weight_bytes_for(i) for i in range(num_stages + 1)] == [
        sum(per_pass[:i]) for i in range(num_stages + 1)
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_read_the_last_state_and_the_tokens_drafted(tmp_path: Path, target: Path, name: str) -> None:
    """In an engine, greedy drafts are those of the paper's stages.

    The first stage reads transformers' last hidden state, after the norm, and the token drawn from it.
    """
    folder, paper = make(tmp_path, target, name)

    def chain(state: Tensor, token: int) -> list[int]:
        drafts = []
        for i in range(STAGES):
            state, logits = paper.stage(i, state[-1:] if i else state[None], torch.tensor([token]))
            drafts.append(token := int(logits[0].argmax()))
        return drafts

    assert_drafts(target, {"method": "mlp_speculator", "model": str(folder)}, STAGES, chain, oracle(target))


@pytest.mark.parametrize("name", VARIANTS)
def test_described_as_it_is_loaded(tmp_path: Path, target: Path, decoder: Decoder, name: str) -> None:
    folder, _ = make(tmp_path, target, name)
    loaded = head_of("mlp_speculator", folder, decoder, num_stages=3)
    described_decoder = describe_decoder(ModelConfig.from_folder(target), torch.float32)
    described = [head_of("mlp_speculator", folder, described_decoder, num_stages=3)]
    (folder / "model.safetensors").unlink()
    described.append(head_of("mlp_speculator", folder, described_decoder, num_stages=3))
    for head in described:
        assert {k: p.shape for k, p in head.named_parameters()} == {k: p.shape for k, p in loaded.named_parameters()}
        assert all(tensor.is_meta for tensor in [*head.parameters(), *head.buffers()])
        assert (weight_bytes(head), head.weight_bytes_for(3)) == (weight_bytes(loaded), loaded.weight_bytes_for(3))


@pytest.mark.parametrize("kept", ["last", "all"])
def test_whichever_of_the_tied_names_there_are(tmp_path: Path, target: Path, decoder: Decoder, kept: str) -> None:
    """A file may have any one name of a shared tensor, or all of them; it may also lack the prefix."""
    folder, _ = make(tmp_path, target, "tied")
    expected = head_of("mlp_speculator", folder, decoder, num_stages=STAGES).state_dict()

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            part, number, kind = name.removeprefix("speculator.").split(".")
            tensor = tensors.pop(name)
            shared = [0] if (part, number) == ("proj", "0") else range(int(part == "proj"), STAGES)
            for i in shared if kept == "all" else shared[-1:]:
                tensors[f"{part}.{i}.{kind}"] = tensor.clone()

    edit_tensors(folder, rename)
    found = head_of("mlp_speculator", folder, decoder, num_stages=STAGES).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_speculator_computes_in_the_targets_dtype(tmp_path: Path, target: Path) -> None:
    folder, _ = make(tmp_path, target, "input scaled")
    decoder = load_decoder(ModelConfig.from_folder(target), torch.bfloat16)
    head = head_of("mlp_speculator", folder, decoder, num_stages=2)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    y = head(torch.tensor([5]), torch.ones(1, 64, dtype=torch.bfloat16), torch.tensor([0]), no_attend)
    assert (y.dtype, head.logits(y).dtype) == (torch.bfloat16, torch.float32)


BAD_HEADS: dict[str, Bad] = {
    "for another hidden size": (
        change_config(emb_dim=128),
        WeightsError,
        ("made for another target", "emb_dim is 128", "target's is 64"),
    ),
    "for another vocabulary": (
        change_config(vocab_size=300),
        WeightsError,
        ("made for another target", "vocab_size is 300", "target's is 199"),
    ),
    "more stages than there are": (
        change_config(n_predict=5, top_k_tokens_per_head=None),
        WeightsError,
        ("missing: emb.4.weight (199, 64), head.4.weight (199, 64), ln.4.bias (64,)",),
    ),
    "fewer stages than there are": (
        change_config(n_predict=3, top_k_tokens_per_head=[5, 4, 3]),
        WeightsError,
        ("unexpected: emb.3.weight",),
    ),
    "another inner size": (
        change_config(inner_dim=32),
        WeightsError,
        ("emb.0.weight is (199, 64), expected (199, 32)",),
    ),
    "another shape, in a stage that does not run": (
        change_tensors(lambda t: t.update({"speculator.ln.3.bias": torch.zeros(63)})),
        WeightsError,
        ("ln.3.bias is (63,), expected (64,)",),
    ),
    "a norm of the input": (
        change_tensors(lambda t: t.update({"speculator.ln0.weight": torch.zeros(64)})),
        WeightsError,
        ("unexpected: ln0.weight",),
    ),
    "a tensor under two names": (
        change_tensors(lambda t: t.update({"ln.3.bias": torch.zeros(64)})),
        WeightsError,
        ("ln.3.bias is there twice",),
    ),
    "stages of their own that are said to be tied": (
        change_config(tie_weights=True),
        WeightsError,
        ("tie_weights is true", "emb.1.weight differs"),
    ),
    "stages tied that are said to be their own": (
        lambda folder: edit_tensors(
            folder, lambda t: [t.pop(name) for name in [*t] if ".0." not in name and ".proj.1" not in name]
        ),
        WeightsError,
        ("missing: emb.1.weight (199, 64)",),
    ),
    "one stage that is tied": (
        change_config(tie_weights=True, n_predict=1, top_k_tokens_per_head=None),
        CheckpointError,
        ("'tie_weights' = true with n_predict = 1",),
    ),
    "a list of another length": (
        change_config(top_k_tokens_per_head=[5, 4, 3]),
        CheckpointError,
        ("'top_k_tokens_per_head' = [5, 4, 3] does not list n_predict = 4",),
    ),
    "another kind": (
        change_config(model_type="medusa"),
        UnsupportedError,
        ("for method='medusa', not for method='mlp_speculator'", "leave method unset"),
    ),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_a_bad_speculator_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    folder, _ = make(tmp_path, target, "as wide as the target")
    wishes = {"method": "mlp_speculator", "model": str(folder)}
    assert_refused(target, {**wishes, "num_speculative_tokens": 1}, BAD_HEADS[what])


def test_no_more_drafts_than_stages(tmp_path: Path, target: Path) -> None:
    folder, _ = make(tmp_path, target, "tied")
    with LLM(target, {"model": str(folder)}) as llm:  # recognised by its config.json
        speculation = llm.engine.loop.proposer.speculation
        assert (speculation.mode.name, speculation.num_speculative_tokens) == ("MLP_SPECULATOR", STAGES)
        assert speculation.capture_layers == (-1,)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=5 exceeds the 4 heads .*use at most 4"):
        LLM(target, {"model": str(folder), "num_speculative_tokens": 5})
