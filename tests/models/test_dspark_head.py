"""DSpark drafts equal those of the published equations without a cache, and those that `speculators` computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint, oracle
from tests.dspark_checkpoints import make_dspark
from tests.models import dspark_cases as cases
from tests.models.built_heads import head_of
from tests.models.head_session import GREEDY, Watching, assert_close, states, told
from tests.models.paper_heads import VOCAB, K, session_of
from tests.models.test_newer_heads import regroup
from tests.models.test_parallel_heads import MASK, PaperDFlash
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.dspark.worker import DSparkWorker
from trtspec.models.attention import PagedAttend
from trtspec.models.weights import describe_decoder, load_decoder

SOME_IDS = tuple(range(1, VOCAB, 3))


class WatchedDSpark(Watching, DSparkWorker):
    """A worker that keeps the logits from which its drafts were drawn."""

    def reset(self) -> None:
        super().reset()
        self.drawn: list[Tensor] = []  # [B, Vd] of each draft

    def draw_from(self, logits: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None) -> Tensor:
        self.drawn.append(logits)
        return super().draw_from(logits, sampling, probs)


# -- the paper -----------------------------------------------------------------------------------------------------


class PaperDSpark(PaperDFlash):
    """DeepSpec's DSpark: eq. 3 to 8 of the paper, draft by draft."""

    def read_config(self, folder: Path) -> dict[str, Any]:
        config = super().read_config(folder)
        return {**config, **config.get("transformer_layer_config", {})}

    def from_left_to_right(
        self, captured: Tensor, token: int, taught: list[int] | None = None
    ) -> tuple[Tensor, list[int], Tensor]:
        """Draft after `token`; captured [n, ...] is of the text before it -> logits [K, Vd], K drafts, confidences [K].

        The confidences are empty where there is no confidence head. taught: tokens that replace the drafts as input, in
        training.
        """
        from_anchor = self.config.get("sample_from_anchor", True)
        ids = [token, *[MASK] * (K - from_anchor)]
        h = self.norm(self.forward(self.embedding[ids], self.fuse(captured)), "norm")
        w, kind, rank = self.w, self.config["markov_head_type"], self.config["markov_rank"]
        lm_head = self.lm_head
        state, previous, logits, drafts, confidences = torch.zeros(rank), token, [], [], []
        for row in range(len(ids)):
            e = w["markov_head.markov_w1.weight"][previous] if rank else torch.zeros(0)
            read = e
            if rank and kind == "gated":
                read = torch.sigmoid(self.linear(torch.cat((h[row], e)), "markov_head.gate_proj")) * e
            if rank and kind == "rnn":
                g, c, o = self.linear(torch.cat((state, e, h[row])), "markov_head.joint_proj").chunk(3)
                state, read = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
            if row == 0 and not from_anchor:
                continue
            bias = w["markov_head.markov_w2.weight"] @ read if rank else 0.0
            logits.append(lm_head @ h[row] + bias)
            if self.config["enable_confidence_head"]:
                judged = torch.cat((h[row], e)) if self.config["confidence_head_with_markov"] else h[row]
                confidences.append(self.linear(judged, "confidence_head.proj")[0].sigmoid())
            best = int(logits[-1].argmax())
            previous = best + int(w["d2t"][best]) if "d2t" in w else best
            drafts.append(previous)
            previous = previous if taught is None else taught[len(drafts) - 1]
        return torch.stack(logits), drafts, torch.stack(confidences) if confidences else torch.empty(0)


PAPER: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "fill-in": {"from_anchor": False},
    "fill-in, rnn": {"from_anchor": False, "markov": "rnn"},
    "DeepSpec's layout": {"deepspec": True, "markov": "gated"},
    "as a DFlash": {"deepspec": True, "rank": 0, "confidence": False},
    "reduced vocabulary": {"target_ids": SOME_IDS},
    "confidence of the block alone": {"confidence_reads_markov": False},
    "states in another order": {"capture": (3, 0)},
    "biases": {"attention_bias": True, "num_layers": 3},
}


@pytest.mark.parametrize("name", PAPER)
def test_drafts_are_those_of_the_paper(tmp_path: Path, name: str) -> None:
    """Drafts after a prompt, and after steps that accept none, some and all drafts, equal those of the paper.

    Where a step requests fewer drafts, they are the first of the same drafts.
    """
    fields = {"capture": (0, 1, 3), **PAPER[name]}
    capture = fields.pop("capture")
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, initializer_range=0.06, name="target")
    draft = make_dspark(tmp_path, target, capture, MASK, **fields)
    theirs, generator = oracle(target), torch.Generator().manual_seed(1)
    paper = PaperDSpark(draft, theirs)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (90, 7)]
    session = session_of(
        target,
        lambda decoder: head_of("dspark", draft, decoder, num_captured=len(capture)),
        capture,
        prompts,
        partial(WatchedDSpark, mask_token_id=MASK, gives_scores=True),
    )
    worker = session.worker
    assert isinstance(worker, WatchedDSpark)
    own_ids = worker.draft_ids.tolist()
    for accepted, asked in ((None, K), (2, K), (0, 2), (1, K), (4, 1)):  # None: the prompts
        drafts = [[] if accepted is None else told(theirs, known, accepted, K) for known in session.known]
        outputs = session.launch(drafts, asked)
        assert outputs.proposal is not None
        assert outputs.proposal.draft_lens is not None
        assert outputs.proposal.draft_lens.tolist() == [asked] * 2
        for b, known in enumerate(session.known):
            logits, ids, confidences = paper.from_left_to_right(states(theirs, known[:-1], capture)[0], known[-1])
            assert outputs.proposal.draft_tokens[b].tolist() == ids[:asked]
            assert_close(torch.stack(worker.drawn)[:, b], logits[:asked])
            assert outputs.proposal.draft_scores is not None
            likely = [float(row.softmax(0)[own_ids[draft]]) for row, draft in zip(logits, ids, strict=True)]
            scores = confidences if len(confidences) else torch.tensor(likely)
            assert_close(outputs.proposal.draft_scores[b], scores[:asked])


def test_a_block_lies_under_the_tables_of_its_own_layers(tmp_path: Path) -> None:
    """Drafts are the same, bit for bit, whether KV groups share a table or have their own tables."""
    target = make_checkpoint(tmp_path, "mistral_swa", name="target")
    draft = make_dspark(tmp_path, target, (0, 1), MASK, sliding_window=None)
    drawn = []
    for own_tables in (False, True):
        session = session_of(
            target,
            lambda decoder: head_of("dspark", draft, decoder, num_captured=2),
            (0, 1),
            [[*range(3, 33)], [5, 6, 7]],
            partial(WatchedDSpark, mask_token_id=MASK),
        )
        worker = session.worker
        assert isinstance(worker, WatchedDSpark)
        assert set(session.step.kv_groups) == {0, 1}
        if own_tables:
            regroup(session)
        for drafts in ([], [5] * K, [6] * K):
            session.launch([drafts] * 2)
            drawn.append(torch.stack(worker.drawn))
    assert all(torch.equal(one, other) for one, other in zip(drawn[:3], drawn[3:], strict=True))


# -- speculators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_drafts_are_those_of_speculators(tmp_path: Path, name: str) -> None:
    """Drafts of three requests in one batch equal those that dspark_oracle.py recorded, in fp32.

    No target made the requests' states.
    """
    target = cases.make_target(tmp_path / "target")
    folder, (captured, text) = cases.make_case(tmp_path, target, name), cases.inputs(name)
    layers = cases.CASES[name].get("capture", cases.LAYERS)
    head = head_of(
        "dspark",
        folder,
        load_decoder(ModelConfig.from_folder(target), torch.float32),
        num_captured=len(layers),
        first_layer=0,
    )
    drafts = cases.BLOCK if head.spec.from_anchor else cases.BLOCK - 1
    worker = WatchedDSpark(head, drafts, layers, mask_token_id=cases.MASK, gives_scores=True)
    worker.reset()
    B, lengths = len(cases.LENGTHS), list(cases.LENGTHS)
    attn = AttnMetadata.of(lengths, lengths, [list(range(1 + 6 * b, 7 + 6 * b)) for b in range(B)])
    sampling = SamplingTensors.of([GREEDY] * B, lengths)
    inputs = StepInputs(
        torch.cat([text[:n] for n in lengths]), attn, SpecMetadata.plain(range(B), attn, sampling, drafts)
    )
    attend = PagedAttend(attn, allocate_layers(head.kv_layers, 32, 4, torch.float32), [None] * len(head.kv_layers))
    accepted, counts = text[lengths][:, None], torch.ones(B, dtype=torch.long)
    with torch.no_grad():
        read = torch.cat([captured[:n] for n in lengths])
        hidden, rows = worker.read_in(inputs, read, accepted, counts, attend)
        made = worker.draft(hidden, counts, rows.kv_lens, rows, inputs.spec, attend)
    with np.load(cases.RECORDED) as recorded:
        for b, length in enumerate(lengths):
            want = {
                what: torch.from_numpy(recorded[f"{name}/{length}/{what}"])
                for what in ("ids", "logits", *(("confidences",) if head.spec.confidence else ()))
            }
            assert made.draft_tokens[b].tolist() == want["ids"].tolist()
            assert_close(torch.stack(worker.drawn)[:, b], want["logits"], atol=1e-4)
            if head.spec.confidence:
                assert made.draft_scores is not None
                assert_close(made.draft_scores[b], want["confidences"], atol=1e-4)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


def test_a_described_draft_is_the_loaded_one(tmp_path: Path, target: Path) -> None:
    folder = make_dspark(tmp_path, target, (1, 2), MASK, markov="rnn", target_ids=SOME_IDS)
    loaded, described = (
        head_of("dspark", folder, make(ModelConfig.from_folder(target), torch.float32), num_captured=2)
        for make in (load_decoder, describe_decoder)
    )
    assert described.kv_layers == loaded.kv_layers
    shapes = {name: parameter.shape for name, parameter in loaded.named_parameters()}
    assert {name: parameter.shape for name, parameter in described.named_parameters()} == shapes
    assert shapes["markov.joint.weight"] == (24, 80)


@pytest.mark.parametrize("judges", [{}, {"confidence_threshold": 0.5}, {"gives_scores": True}])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_what_a_step_reads(tmp_path: Path, target: Path, from_anchor: bool, kind: str, judges: dict[str, Any]) -> None:
    """A step counts the fused weights of q, k and v twice, for the text and for the block, and a bias per draft."""
    folder = make_dspark(tmp_path, target, (1, 2), MASK, markov=kind, from_anchor=from_anchor)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    head = head_of("dspark", folder, decoder, num_captured=2)
    worker = DSparkWorker(head, K, (1, 2), mask_token_id=MASK, **judges)
    times = {"markov_head": K, "confidence_head": int(bool(judges)), "embed_tokens": 0}
    twice = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    expected = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        number = times.get(name.split(".")[0], 2 if any(part in name for part in twice) else 1)
        number = 0 if "markov_w1" in name else number + (not from_anchor and "joint_proj" in name)
        expected += number * tensor.nbytes
    assert worker.weight_bytes_per_step == expected


def opened(target: Path, draft: Path, **fields: Any) -> None:
    with LLM(target, {"model": str(draft), "num_speculative_tokens": K, **fields}) as llm:
        llm.generate([1, 2, 3])


def says(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def layers_say(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        edit_config(folder, transformer_layer_config={**layers, **fields})

    return change


Bad = tuple[dict[str, Any], Callable[[Path], None], type[TrtSpecError], tuple[str, ...]]
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
BAD: dict[str, Bad] = {
    "Gemma's": (
        {"deepspec": True},
        says(architectures=["Gemma4DSparkModel"]),
        UnsupportedError,
        ("'Gemma4DSparkModel'", "supported: Qwen3DSparkModel"),
    ),
    "layers of another kind": ({}, layers_say(model_type="llama"), UnsupportedError, ("'llama'", "supported: qwen3")),
    "sliding layers": ({}, layers_say(**SLIDING), UnsupportedError, ("sliding window", "use a draft of")),
    "a head nobody knows": ({}, says(markov_head_type="lstm"), UnsupportedError, ("lstm", "vanilla, gated, rnn")),
    "of DeepSeek-V4": ({}, says(dspark_block_size=5), UnsupportedError, ("dspark_block_size", "another method")),
    "a wider target": ({}, says(target_hidden_size=96), UnsupportedError, ("target_hidden_size", "only 64 is built")),
    "other positions": ({}, says(is_neox_style=False), UnsupportedError, ("is_neox_style", "only True is built")),
    "quantised": (
        {},
        says(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
        UnsupportedError,
        ("markov_head.markov_w2 is int4", "do not fill int32 words of 8"),
    ),
    "the embedding": (
        {},
        says(aux_hidden_state_layer_ids=[0, 2]),
        UnsupportedError,
        ("aux_hidden_state_layer_ids", "0 is the embedding"),
    ),
    "the embedding, as DeepSpec counts": (
        {"deepspec": True},
        says(target_layer_ids=[-1, 2]),
        UnsupportedError,
        ("target_layer_ids", "-1 is the embedding"),
    ),
    "no layers": ({}, says(aux_hidden_state_layer_ids=None), CheckpointError, ("aux_hidden_state_layer_ids", ">= 1")),
    "layers that are not there": ({"deepspec": True}, says(target_layer_ids=[0, 9]), ConfigError, ("(0, 9)", "4 lay")),
    "no mask token": ({}, says(mask_token_id=None), ConfigError, ("mode=DSPARK", "mask_token_id")),
    "no room for a mask": ({"from_anchor": False}, says(block_size=1), CheckpointError, ("block_size", "no room")),
    "too short a block": ({}, says(block_size=3), ConfigError, ("=4 exceeds the 3 drafts of a block", "at most 3")),
    "a rank below 0": ({}, says(markov_rank=-1), CheckpointError, ("markov_rank", "0 = no Markov head")),
    "confidence of no head": (
        {"rank": 0},
        says(confidence_head_with_markov=True),
        CheckpointError,
        ("confidence_head_with_markov", "markov_rank 0"),
    ),
    "too many ids": ({}, says(draft_vocab_size=500), CheckpointError, ("draft_vocab_size", "more than the 199 ids")),
    "ids without d2t": ({}, says(draft_vocab_size=66), WeightsError, ("markov_w2", "(66, 8)")),
    "no d2t": (
        {"target_ids": SOME_IDS},
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("d2t")),
        WeightsError,
        ("d2t (66,) is missing",),
    ),
    "another rank": ({}, says(markov_rank=16), WeightsError, ("markov_head.markov_w1.weight", "(199, 16)")),
    "a confidence head that is not said": (
        {},
        says(enable_confidence_head=False),
        WeightsError,
        ("confidence_head.proj.weight",),
    ),
    "for more layers": ({"deepspec": True}, says(num_target_layers=9), WeightsError, ("num_target_layers is 9",)),
}


FIRST_OF = {str(fields): what for what, (fields, *_) in reversed(BAD.items())}
"""The first name of each checkpoint in BAD; its test opens the checkpoint before the change."""


@pytest.mark.parametrize("what", BAD)
def test_a_bad_draft_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    fields, change, error, words = BAD[what]
    draft = make_dspark(tmp_path, target, (0, 1), MASK, **fields)
    if what == FIRST_OF[str(fields)]:
        opened(target, draft)
    change(draft)
    with pytest.raises(error) as caught:
        opened(target, draft, method="dspark")
    for word in words:
        assert word in str(caught.value)
