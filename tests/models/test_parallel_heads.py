"""Drafts of one pass over mask tokens, against a forward pass over [text, masks] without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import (
    edit_config,
    edit_tensors,
    make_checkpoint,
    make_dflash,
    make_eagle3,
    oracle,
    oracle_logits,
)
from tests.models.built_heads import head_of
from tests.models.head_session import Watching, assert_close, states, told
from tests.models.paper_heads import VOCAB, K, PaperHead, session_of, turned
from tests.models.test_eagle3_head import SOME_IDS, PaperEagle3
from trtspec import LLM
from trtspec.build.plan import plan_build
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.methods.dflash.worker import DFlashWorker
from trtspec.methods.draft_model.head import DecoderHead
from trtspec.methods.head import DraftHead
from trtspec.methods.parallel.worker import PardWorker, PEagleWorker
from trtspec.models.decoder import Decoder
from trtspec.models.weights import describe_decoder, load_decoder

MASK = 77

Expected = Callable[[list[int]], Tensor]
"""Tokens of a request, the one just drawn included -> logits [K, Vd] of its drafts."""


class WatchedPard(Watching, PardWorker):
    """Keeps what its pass gave."""


class WatchedPEagle(Watching, PEagleWorker):
    """The same."""


def assert_drafts_are_those_of(
    target: Path,
    load: Callable[[Decoder], DraftHead],
    kind: Callable[..., Watching],
    capture: Sequence[int],
    expected_of: Callable[[transformers.PreTrainedModel], Expected],
    target_ids: Sequence[int] = range(VOCAB),
) -> None:
    """Prompts, then drafts of which none, some and all are accepted: neither rejected rows nor masks leave a trace."""
    theirs, generator = oracle(target), torch.Generator().manual_seed(1)
    expected = expected_of(theirs)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (90, 7)]
    session = session_of(target, load, capture, prompts, partial(kind, mask_token_id=MASK))
    for accepted in (None, 2, 0, 4, 1):  # None: the prompts
        outputs = session.launch(
            [[] if accepted is None else told(theirs, known, accepted, K) for known in session.known]
        )
        assert outputs.proposal is not None
        assert outputs.verdict is not None
        assert outputs.verdict.num_tokens.tolist() == [1 if accepted is None else accepted + 1] * 2
        (scores,) = session.worker.scores  # of one pass
        for b, known in enumerate(session.known):
            logits = expected(known)
            assert_close(scores.view(2, K, -1)[b], logits)
            assert outputs.proposal.draft_tokens[b].tolist() == [target_ids[i] for i in logits.argmax(-1).tolist()]


# -- PARD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "llama31", "mistral_swa", "qwen2", "qwen3"])
def test_pard_reads_the_text_and_masks(tmp_path: Path, arch: str) -> None:
    """transformers' own model of the draft is the oracle; the target is of another kind and depth."""
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=2, initializer_range=0.06, name="target")
    draft = make_checkpoint(tmp_path, arch, initializer_range=0.06, name="draft", seed=5)
    model = oracle(draft)

    def load(decoder: Decoder) -> DraftHead:
        config = ModelConfig.from_folder(draft, "draft")
        return DecoderHead(load_decoder(config, torch.float32, "draft"), decoder.spec.num_layers)

    def expected(known: list[int]) -> Tensor:
        return oracle_logits(model, [*known, *[MASK] * (K - 1)])[-K:]

    assert_drafts_are_those_of(target, load, WatchedPard, (), lambda theirs: expected)


# -- P-EAGLE -------------------------------------------------------------------------------------------------------


class PaperPEagle(PaperEagle3):
    """EAGLE3's layer, then plain ones; K drafts at once."""

    def at_once(self, captured: Tensor, following: list[int]) -> Tensor:
        """captured [n, ...] and the token after each position -> logits [K, Vd]."""
        masks = K - 1
        fused = self.fuse(torch.cat((captured, self.w["mask_hidden"].reshape(1, -1).expand(masks, -1))))
        x = self.forward(self.embedding[[*following, *[MASK] * masks]], fused)
        for i in range(1, self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            x = x + self.attention(self.norm(x, f"{layer}input_layernorm"), layer)
            x = x + self.mlp(self.norm(x, f"{layer}post_attention_layernorm"), layer)
        return self.logits(x[-K:])


P_EAGLE: dict[str, dict[str, Any]] = {
    "one layer": {"num_layers": 1},
    "four layers": {"num_layers": 4, "own_embedding": True},
    "reduced vocabulary": {"num_layers": 2, "target_ids": SOME_IDS, "own_embedding": True},
    "norm before residual": {"num_layers": 2, "norm_before_residual": True},
    "biases": {"num_layers": 2, "attention_bias": True},
    "shared lm_head": {"num_layers": 2, "own_head": False},
    "vLLM's name": {"num_layers": 2, "architectures": ["PeagleLlamaForCausalLM"]},
}


@pytest.mark.parametrize("name", P_EAGLE)
def test_p_eagle_reads_states_and_masks(tmp_path: Path, name: str) -> None:
    capture, fields = (0, 1, 3), P_EAGLE[name]
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=4, initializer_range=0.06, name="target")
    head = make_eagle3(tmp_path, target, None, mask=MASK, **fields)

    def expected_of(theirs: transformers.PreTrainedModel) -> Expected:
        paper = PaperPEagle(head, theirs)
        return lambda known: paper.at_once(states(theirs, known[:-1], capture)[0], known[1:])

    assert_drafts_are_those_of(
        target,
        lambda decoder: head_of("eagle3", head, decoder, num_captured=3, parallel=True),
        WatchedPEagle,
        capture,
        expected_of,
        fields.get("target_ids", range(VOCAB)),
    )


# -- DFlash --------------------------------------------------------------------------------------------------------


class WatchedDFlash(Watching, DFlashWorker):
    """Keeps what its pass gave."""


class PaperDFlash(PaperHead):
    """z-lab's: a block whose rows see the text's keys and values, made of the target's states, and each other."""

    def fuse(self, captured: Tensor) -> Tensor:
        return self.norm(self.linear(captured, "fc"), "hidden_norm")

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        """e [K+1, H] of the block, h [n, H] of the text -> y [K+1, H]."""
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            e = e + self.all_to_all(self.norm(e, f"{layer}input_layernorm"), h, f"{layer}self_attn.")
            e = e + self.mlp(self.norm(e, f"{layer}post_attention_layernorm"), layer)
        return e

    def logits(self, y: Tensor) -> Tensor:
        return self.norm(y, "norm") @ self.lm_head.T

    def all_to_all(self, x: Tensor, text: Tensor, prefix: str) -> Tensor:
        def heads(rows: Tensor, name: str) -> Tensor:
            return self.linear(rows, f"{prefix}{name}_proj").unflatten(-1, (-1, self.config["head_dim"]))

        both = torch.cat((text, x))
        q, k = self.norm(heads(x, "q"), f"{prefix}q_norm"), self.norm(heads(both, "k"), f"{prefix}k_norm")
        cos, sin = (table[0][:, None] for table in self.rotary(x, torch.arange(len(both))[None]))
        q = q * cos[len(text) :] + turned(q) * sin[len(text) :]
        k = k * cos + turned(k) * sin
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), heads(both, "v").repeat_interleave(groups, dim=1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{prefix}o_proj")

    def at_once(self, captured: Tensor, token: int) -> Tensor:
        """captured [n, ...] of the text before the token -> logits [K, V]."""
        return self.logits(self.forward(self.embedding[[token, *[MASK] * K]], self.fuse(captured))[1:])


DFLASH: dict[str, dict[str, Any]] = {
    "two layers": {},
    "four layers, one state": {"num_layers": 4, "capture": (2,)},
    "biases": {"attention_bias": True},
    "states in another order": {"capture": (3, 0)},
    "as many KV heads": {"num_key_value_heads": 4},
    "block_size in dflash_config": {
        "block_size": None,
        "dflash_config": {"target_layer_ids": [0, 1, 3], "mask_token_id": MASK, "block_size": 8},
    },
}


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_blocks_see_the_text_and_themselves(tmp_path: Path, name: str) -> None:
    fields = {"capture": (0, 1, 3), **DFLASH[name]}
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, initializer_range=0.06, name="target")
    draft = make_dflash(tmp_path, target, mask=MASK, **fields)
    capture = fields["capture"]

    def expected_of(theirs: transformers.PreTrainedModel) -> Expected:
        paper = PaperDFlash(draft, theirs)
        return lambda known: paper.at_once(states(theirs, known[:-1], capture)[0], known[-1])

    assert_drafts_are_those_of(
        target,
        lambda decoder: head_of("dflash", draft, decoder, num_captured=len(capture)),
        WatchedDFlash,
        capture,
        expected_of,
    )


# -- checkpoints ---------------------------------------------------------------------------------------------------


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
    """But neither the embedding nor, among matrices, mask_hidden."""
    head = make_eagle3(tmp_path, target, mask=MASK, num_layers=2)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    loaded = head_of("eagle3", head, decoder, num_captured=3, parallel=True)
    worker = PEagleWorker(loaded, K, (0, 1, 2), mask_token_id=MASK)
    tensors = load_file(head / "model.safetensors")
    assert worker.weight_bytes_per_step == sum(t.nbytes for name, t in tensors.items() if name != "mask_hidden")
    assert worker.draft_rows == K


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
    "a norm before fc": (
        lambda folder: edit_config(folder, norm_before_fc=True),
        UnsupportedError,
        ("norm_before_fc = True is not built",),
    ),
    "norms of each state": (
        lambda folder: edit_config(folder, eagle_config={"fc_norm": True}),
        UnsupportedError,
        ("fc_norm = True is not built",),
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
    """A dflash_config with these fields beside what it needs."""
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
        UnsupportedError,
        ("draft_vocab_size",),
    ),
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
