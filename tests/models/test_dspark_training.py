"""Training of DSpark drafts: the loss is the paper's, and trained drafts run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint, oracle
from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import make_target
from tests.e2e.training import make_training_batch, metrics, random_ids
from tests.models.built_heads import head_of
from tests.models.head_session import states
from tests.models.paper_heads import VOCAB, K
from tests.models.test_dspark_head import PaperDSpark
from tests.models.test_parallel_heads import MASK
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError
from trtspec.methods.dspark.train import BlockLoss, Blocks, DSparkTraining, anchors_of
from trtspec.models.weights import load_decoder
from trtspec.train.run import train_head
from trtspec.train.training_batches import TrainingBatch, texts_of

CAPTURE, SEQ, ANCHORS = (0, 2), 24, 3


def paper_loss(paper: PaperDSpark, theirs: Any, window: list[int], anchors: list[int]) -> Tensor:
    """Loss of one window by equations 9 to 12, block by block."""
    captured, wanted = states(theirs, window, CAPTURE)
    terms, weights = [], []
    for anchor in anchors:
        taught = window[anchor + 1 : anchor + 1 + K]
        logits, _, confidences = paper.from_left_to_right(captured[:anchor], window[anchor], taught)
        for k in range(K):
            q, p = logits[k].softmax(-1), wanted[anchor + k].softmax(-1)
            distance = (q - p).abs().sum()
            term = 0.1 * -q[taught[k]].log() + 0.9 * distance
            if len(confidences):
                c, likely = confidences[k], 1 - distance / 2
                term = term - likely * c.log() - (1 - likely) * (1 - c).log()
            weights.append(np.exp(-k / 4))
            terms.append(term * weights[-1])
    return torch.stack(terms).sum() / sum(weights)


@pytest.mark.parametrize(
    "fields",
    [{}, {"markov": "gated"}, {"markov": "rnn"}, {"rank": 0, "confidence": False}, {"confidence_reads_markov": False}],
    ids=str,
)
def test_the_loss_is_that_of_the_paper(tmp_path: Path, fields: dict[str, Any]) -> None:
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=3, initializer_range=0.06, name="target")
    draft = make_dspark(tmp_path, target, CAPTURE, MASK, **fields)
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32).train()
    head = head_of("dspark", draft, decoder, num_captured=len(CAPTURE)).train()
    windows = torch.randint(3, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(2))
    loss = BlockLoss(Blocks(head, K, MASK), decoder, ANCHORS, torch.float32)
    found = loss(*make_training_batch(decoder, CAPTURE, windows))
    stride = (SEQ - 1 - K) // ANCHORS
    theirs = oracle(target)
    paper = PaperDSpark(draft, theirs)
    with torch.no_grad():
        wanted = [
            paper_loss(paper, theirs, window, [1 + sum(window) % stride + stride * i for i in range(ANCHORS)])
            for window in windows.tolist()
        ]
    torch.testing.assert_close(found, torch.stack(wanted).mean(), rtol=1e-5, atol=1e-5)


def test_blocks_lie_where_they_can_be_taught() -> None:
    """Every usable block of random training batches lies in one text, after a token of it, and all of it is taught."""
    generator = torch.Generator().manual_seed(0)
    usable_blocks = 0
    for _ in range(50):
        starts = torch.rand(4, SEQ, generator=generator) < 0.1
        starts[:, 0] = True
        places = torch.stack([_places(row.tolist()) for row in starts])
        taught = torch.rand(4, SEQ, generator=generator) < 0.9
        inputs = torch.randint(VOCAB, (4, SEQ), generator=generator)
        nothing = torch.empty(4, SEQ, 0)
        anchors, usable = anchors_of(TrainingBatch(inputs, places, taught, inputs, nothing, nothing), K, ANCHORS)
        assert anchors.shape == usable.shape == (4, ANCHORS)
        texts = texts_of(places)
        able = [
            [
                p > 0 and places[b, p] > 0 and p + K <= SEQ - 1
                and bool((texts[b, p : p + K] == texts[b, p]).all()) and bool(taught[b, p : p + K].all())
                for p in range(SEQ)
            ]
            for b in range(4)
        ]  # fmt: skip
        for b in range(4):
            chosen = anchors[b][usable[b]].tolist()
            assert len(set(chosen)) == len(chosen) == min(ANCHORS, sum(able[b]))
            assert all(able[b][p] for p in chosen)
            usable_blocks += len(chosen)
    assert usable_blocks > 200


def _places(starts: list[bool]) -> Tensor:
    place, found = 0, []
    for start in starts:
        place = 0 if start else place + 1
        found.append(place)
    return torch.tensor(found)


def test_texts_of_a_window_do_not_see_each_other(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=3, name="target")
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32).train()
    draft = make_dspark(tmp_path, target, CAPTURE, MASK)
    head = head_of("dspark", draft, decoder, num_captured=len(CAPTURE)).train()
    ids = torch.randint(3, VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(2))
    places = torch.cat((torch.arange(SEQ // 2), torch.arange(SEQ // 2)))[None]
    # A window has one block, and only the second text is taught, so the first text must have no influence.
    taught = torch.arange(SEQ)[None] >= SEQ // 2
    loss = BlockLoss(Blocks(head, K, MASK), decoder, 1, torch.float32)
    packed = make_training_batch(decoder, CAPTURE, ids, places, taught)
    other = ids.clone()
    other[:, : SEQ // 2] = other[:, : SEQ // 2].flip(1)  # the same sum, which determines the place of the block
    changed = make_training_batch(decoder, CAPTURE, other, places, taught)
    assert anchors_of(packed, K, 1)[1].all()
    torch.testing.assert_close(loss(*packed), loss(*changed))
    whole = make_training_batch(decoder, CAPTURE, ids, taught=taught)
    assert float(loss(*whole)) != pytest.approx(float(loss(*packed)), abs=1e-4)


@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_what_is_trained_runs(tmp_path: Path, markov: str) -> None:
    target = make_target(tmp_path, num_hidden_layers=3)
    np.save(tmp_path / "ids.npy", random_ids(4000, 1))
    options = DSparkTraining(
        target=target,
        data=(tmp_path / "ids.npy",),
        out=tmp_path / "draft",
        run=tmp_path / "run",
        steps=40,
        regenerate=0,
        seq_len=32,
        unroll=4,
        anchors=6,
        rank=8,
        markov=markov,
        capture_layers=CAPTURE,
        dtype="float32",
    )
    trained = train_head(options)
    losses = [line["loss"] for line in metrics(options.run)]
    assert trained.step == 40
    assert losses[-1] < losses[0]
    prompt = [1, 2, 3, 4]
    with LLM(target) as llm:
        wanted = [one.outputs[0].token_ids for one in llm.generate([prompt])]
    with LLM(target, {"model": str(options.out), "draft_confidence_threshold": 0.2}) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate([prompt])] == wanted


def test_options_that_cannot_be(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target": tmp_path, "data": (tmp_path,), "out": tmp_path / "o", "run": tmp_path / "r"}
    for wrong, words in (
        ({"markov": "lstm"}, "markov='lstm'; use one of vanilla, gated, rnn"),
        ({"seq_len": 16}, "anchors=16: seq_len=16 has no room"),
        ({"seq_len": 20}, "anchors=16: seq_len=20 has no room"),
        ({"rank": -1}, "rank=-1 is no width; use a positive one, or 0"),
        ({"held_out": tmp_path}, "held_out: drafts of kind 'dspark' are not simulated"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            DSparkTraining(**{**fields, "steps": 1, **wrong})


@pytest.mark.parametrize("mask", [-1, VOCAB, 10**9])
def test_a_mask_token_that_the_target_has_not(tmp_path: Path, mask: int) -> None:
    config = ModelConfig.from_folder(make_checkpoint(tmp_path, "qwen3", name="target"))
    options = DSparkTraining(
        target=tmp_path, data=(tmp_path,), out=tmp_path / "o", run=tmp_path / "r", steps=1, mask_token_id=mask
    )
    with pytest.raises(ConfigError, match=rf"mask_token_id={mask} is not in the target's vocabulary; .*\[0, 198\]"):
        options.check_target(config)
    replace(options, mask_token_id=VOCAB - 1).check_target(config)
