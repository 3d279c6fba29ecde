"""EAGLE3 heads: the arithmetic of the paper, the source of the hidden states, and the loading of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_tensors, make_checkpoint, oracle
from tests.head_checkpoints import make_eagle3
from tests.models import eagle3_heads
from tests.models.built_heads import head_of
from tests.models.eagle3_heads import EAGLE3, LAYERS, SOME_IDS, Tensors, build_step, eagle_step
from tests.models.head_session import assert_close, states
from tests.models.paper_heads import VOCAB, K, PaperHead, assert_every_pass_is_that_of_the_paper, session_of
from trtspec import LLM
from trtspec.backends.eager import EagerExecutable
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata
from trtspec.engine.stats import TimedExecutable
from trtspec.interop.decoding_configs import Eagle3DecodingConfig
from trtspec.kv.pool import allocate_layers
from trtspec.methods.eagle3.weights import eagle3_tensors
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend
from trtspec.models.weights import load_decoder

deep = eagle3_heads.deep
head = eagle3_heads.head


class PaperEagle3(PaperHead):
    """EAGLE-3 as published (Li et al., arXiv 2503.01840)."""

    def read_config(self, folder: Path) -> dict[str, Any]:
        config = super().read_config(folder)
        self.w = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in self.w.items()}
        return {**config, **config.get("transformer_layer_config", {})}

    def fuse(self, captured: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            captured = self.norm(captured, "input_norm")
        if self.config.get("fc_norm"):
            states = captured.split(self.config["target_hidden_size"], dim=-1)
            captured = torch.cat([self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)], dim=-1)
        return captured @ self.w["fc.weight"].T

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        normed = self.norm(h, "midlayer.hidden_norm")
        x = normed if self.config.get("norm_before_residual") else h
        x = x + self.attention(torch.cat((self.norm(e, "midlayer.input_layernorm"), normed), dim=-1), "midlayer.")
        x = x + self.mlp(self.norm(x, "midlayer.post_attention_layernorm"), "midlayer.")
        return self.norm(x, "norm") if self.config.get("norm_output") else x

    def logits(self, y: Tensor) -> Tensor:
        return (y if self.config.get("norm_output") else self.norm(y, "norm")) @ self.lm_head.T

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id


@dataclass(frozen=True)
class Variant:
    """A target, its head, and the hidden states that the head reads."""

    arch: str = "llama"
    capture: tuple[int, ...] = (0, 1, 3)
    target_ids: list[int] | None = None
    target: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "reduced vocabulary": Variant(target_ids=SOME_IDS),
    "ascending draft ids": Variant(target_ids=sorted(SOME_IDS), head={"norm_before_residual": False}),
    "norm before residual": Variant(target_ids=SOME_IDS, head={"norm_before_residual": True}),
    "identity vocabulary": Variant(),
    "shared lm_head": Variant(head={"own_head": False}),
    "shared lm_head, tied target": Variant(head={"own_head": False}, target={"tie_word_embeddings": True}),
    "own embedding": Variant(target_ids=SOME_IDS, head={"own_embedding": True}),
    "own width": Variant(
        target_ids=SOME_IDS,
        head={"own_embedding": True, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 8},
    ),
    "q and k norms": Variant("qwen3", head={"qk_norm": True, "architectures": ["Qwen3ForCausalLMEagle3"]}),
    "norm before fc": Variant(target_ids=SOME_IDS, head={"norm_before_fc": True, "rms_norm_eps": 1e-3}),
    "norms of each state": Variant(head={"fc_norm": True}),
    "normed output": Variant(target_ids=SOME_IDS, head={"norm_output": True}),
    "layout of speculators": Variant(target_ids=SOME_IDS, head={"speculators": True, "norm_before_fc": True}),
    "biases": Variant(head={"attention_bias": True, "mlp_bias": True}),
    "one KV head": Variant(target_ids=SOME_IDS, head={"num_key_value_heads": 1}),
    "as many KV heads": Variant(head={"num_key_value_heads": 4}),
    "llama3 rope": Variant("llama31", target_ids=SOME_IDS),
    "one hidden state": Variant(capture=(2,)),
    "hidden states in another order": Variant(capture=(3, 0)),
    "last hidden state after the norm": Variant(capture=(0, -1)),
    "qwen2 target": Variant("qwen2", target_ids=SOME_IDS),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_pass_is_that_of_the_paper(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    target = make_checkpoint(
        tmp_path, variant.arch, num_hidden_layers=4, initializer_range=0.06, name="target", **variant.target
    )
    head = make_eagle3(tmp_path, target, None, variant.target_ids, num_captured=len(variant.capture), **variant.head)
    assert_every_pass_is_that_of_the_paper(
        target,
        lambda decoder: head_of("eagle3", head, decoder, num_captured=len(variant.capture)),
        lambda theirs: PaperEagle3(head, theirs),
        variant.capture,
    )


@pytest.mark.parametrize("capture", [(0, 3, 6), (0, 3, LAYERS - 1)])
def test_last_layers_run_their_mlp_on_the_rows_that_are_read(
    tmp_path: Path, deep: Path, capture: tuple[int, ...]
) -> None:
    """A captured last layer is read at all rows."""
    folder, runs = make_eagle3(tmp_path, deep, capture), dict[str, list[int]]()
    session = session_of(
        deep, lambda decoder: head_of("eagle3", folder, decoder, num_captured=3), capture, [[5] * 9, [7] * 4]
    )
    layers, worker = session.step.decoder.layers, session.worker
    watched = {"before": layers[-2], "last": layers[-1], "head": worker.head.midlayer}
    for name, layer in watched.items():
        layer.mlp.register_forward_hook(
            lambda _, inputs, __, name=name: runs.setdefault(name, []).append(len(inputs[0]))
        )
    for drafts, T in (([], 13), ([9, 9, 9], 8)):
        runs.clear()
        session.launch([drafts] * 2)
        last = T if drafts or capture[-1] == LAYERS - 1 else 2
        # The head's first run returns all rows, for comparison; that of the step and later passes one of each request.
        assert runs == {"before": [T], "last": [last], "head": [T, *[2] * K]}


# -- choice of hidden states ---------------------------------------------------------------------------------------


def test_captured_are_the_residual_streams_after_the_layers_named(deep: Path) -> None:
    """The captured streams equal transformers' for each of the 8 layers and for -1, the stream after the last norm."""
    layers = (*range(LAYERS), -1)
    tokens = list(range(3, 40))
    decoder = load_decoder(ModelConfig.from_folder(deep), torch.float32)
    attn = AttnMetadata.of([len(tokens)], [len(tokens)], [[1, 2, 3]])
    attend = PagedAttend(attn, allocate_layers(decoder.spec.kv_layers, 4, 16, torch.float32), decoder.spec.windows)
    positions = attn.positions(len(tokens))
    last, captured = decoder.capture(torch.tensor(tokens), positions, attend, layers)
    expected, _ = states(oracle(deep), tokens, layers)
    assert_close(captured, expected)
    assert torch.equal(last, captured[:, -decoder.spec.hidden_size :])
    assert torch.equal(last, decoder(torch.tensor(tokens), positions, attend))


CHECKPOINT_SAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "nested": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}},
    "ModelOpt's": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 4]}},
    "none": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
    "top level": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]},
}
CAPTURES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("nothing", {}, (1, 3, 4)),  # EAGLE3's own choice
    ("nested", {}, (1, 4, 7)),  # vLLM's ids: the layer that the stream enters
    ("ModelOpt's", {}, (1, 4, 7)),  # the layer that it leaves, in any order
    ("none", {}, (1, 3, 4)),
    ("top level", {}, (0, 3, 7)),
    ("nothing", {"capture_layers": (0, 6, -1)}, (0, 6, -1)),
    ("nested", {"capture_layers": (5, 6, 7)}, (5, 6, 7)),  # the user's choice takes precedence
]


@pytest.mark.parametrize(("says", "wishes", "expected"), CAPTURES)
def test_who_chooses_the_layers(
    tmp_path: Path, deep: Path, says: str, wishes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    head = make_eagle3(tmp_path, deep, **CHECKPOINT_SAYS[says])
    with LLM(deep, {**EAGLE3, "model": str(head), **wishes}) as llm:
        assert eagle_step(llm).worker.capture_layers == expected


@pytest.mark.parametrize(("layers", "expected"), [(None, (1, 4, 7)), ([2, 5, -1], (2, 5, -1))])
def test_layers_as_tensorrt_llm_says_them(
    tmp_path: Path, deep: Path, layers: list[int] | None, expected: tuple[int, ...]
) -> None:
    """A layer in eagle3_layers_to_capture means the residual stream after it."""
    head = make_eagle3(tmp_path, deep, **CHECKPOINT_SAYS["nested"])
    config = Eagle3DecodingConfig(max_draft_len=K, speculative_model=str(head), eagle3_layers_to_capture=layers)
    with LLM(deep, config) as llm:
        assert eagle_step(llm).worker.capture_layers == expected


def test_a_head_found_by_its_folders_name_keeps_its_layers(tmp_path: Path, deep: Path) -> None:
    """Without a method the folder's name says eagle3, and config.json still says which layers."""
    head = make_eagle3(tmp_path, deep, name="my-EAGLE3-head", **CHECKPOINT_SAYS["nested"])
    with LLM(deep, {"model": str(head), "num_speculative_tokens": K}) as llm:
        assert eagle_step(llm).worker.capture_layers == (1, 4, 7)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        old = dict(tensors)
        tensors.clear()
        tensors.update((change(name), tensor) for name, tensor in old.items())

    return apply


ALIASES: dict[str, Callable[[str], str]] = {
    "public": lambda name: name,
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "model. prefix": lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
    "both": lambda name: "model." + name.replace("midlayer.", "layers.0."),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("own_embedding", [False, True])
def test_every_tensor_lands_where_it_belongs(tmp_path: Path, deep: Path, alias: str, own_embedding: bool) -> None:
    """Loaded tensors, written in the public layout again, equal those in the file."""
    folder = make_eagle3(tmp_path, deep, (0, 3, 7), SOME_IDS, own_embedding=own_embedding)
    saved = load_file(folder / "model.safetensors")
    edit_tensors(folder, renamed(ALIASES[alias]))
    worker = build_step(deep, folder).worker
    assert isinstance(worker, SpecWorker)
    ours = eagle3_tensors(worker.head)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    assert not any(parameter.isnan().any() for parameter in worker.parameters())
    assert not worker.head.training
    assert worker.d2t.tolist() == saved["d2t"].tolist()
    back = worker.draft_ids.tolist()
    assert [back[token] for token in SOME_IDS] == list(range(len(SOME_IDS)))
    assert back.count(-1) == VOCAB - len(SOME_IDS)


def test_what_a_head_leaves_out_is_the_targets(tmp_path: Path, deep: Path) -> None:
    """The head uses the very same tensors as the target, not copies, so they cost no memory."""
    step = build_step(deep, make_eagle3(tmp_path, deep, (0, 3, 7), own_head=False))
    worker = step.worker
    assert isinstance(worker, SpecWorker)
    assert worker.head.embedding is step.decoder.embedding
    assert worker.head.head is step.decoder.head
    assert worker.d2t.tolist() == [0] * VOCAB


def test_a_head_computes_in_the_targets_dtype(deep: Path, head: Path) -> None:
    with LLM(deep, {**EAGLE3, "model": str(head)}, dtype="bfloat16") as llm:
        worker = eagle_step(llm).worker
        timed = llm.engine.loop.target
        assert isinstance(timed, TimedExecutable)
        assert isinstance(timed.inner, EagerExecutable)
        assert {parameter.dtype for parameter in worker.parameters()} == {torch.bfloat16}
        assert len(timed.inner.kv) == LAYERS + 1
        assert {tensor.dtype for pair in timed.inner.kv for tensor in pair} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_memory_for_kv_counts_the_heads_layer(tmp_path: Path, deep: Path, dtype: str) -> None:
    """KV blocks count the head's layer in the target's dtype, whatever the dtype of the head's file.

    A block has 16 tokens, K and V, and 16 elements per KV head.
    """
    folder = make_eagle3(tmp_path, deep, (0, 3, 7), num_key_value_heads=4, dtype="bfloat16")
    block = 16 * 2 * (LAYERS * 2 + 4) * 16 * (2 if dtype == "bfloat16" else 4)
    with LLM(deep, {**EAGLE3, "model": str(folder)}, dtype=dtype, kv_cache_memory=9 * block + 1) as llm:
        assert llm.engine.loop.scheduler.allocator.num_blocks == 9


def test_drafts_may_be_asked_to_be_greedy(deep: Path, head: Path) -> None:
    assert not build_step(deep, head).worker.greedy
    assert build_step(deep, head, draft_sample_method="greedy").worker.greedy


def test_weight_bytes_count_each_pass(tmp_path: Path, deep: Path, head: Path) -> None:
    """A step counts fc once, the layer, norm and lm_head in each of the K passes, and the embedding never."""
    tensors = load_file(head / "model.safetensors")
    per_pass = sum(tensor.nbytes for name, tensor in tensors.items() if name not in ("fc.weight", "d2t", "t2d"))
    worker = build_step(deep, head).worker
    assert worker.weight_bytes_per_step == tensors["fc.weight"].nbytes + K * per_pass
    own = make_eagle3(tmp_path, deep, (0, 3, 7), SOME_IDS, own_embedding=True, name="own")
    assert build_step(deep, own).worker.weight_bytes_per_step == worker.weight_bytes_per_step
