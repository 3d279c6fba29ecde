"""Training an EAGLE3 head: unrolled passes are inference, the loss is its definition, bad options are refused early."""

from __future__ import annotations

import copy
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.e2e.training import make_training_batch
from trtspec.core import AttnMetadata
from trtspec.errors import CheckpointError, ConfigError, DependencyError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.eagle3.head import Eagle3Head
from trtspec.methods.eagle3.train import Eagle3Options, new_head
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.train.chains import HeldOut
from trtspec.train.generate import continue_windows
from trtspec.train.language_model import initialise, llama_spec
from trtspec.train.plot import plot_metrics
from trtspec.train.run import _remember
from trtspec.train.trainer import Stage, TrainConfig, Trainer
from trtspec.train.training_batches import TrainingBatch, frequent_tokens
from trtspec.train.unrolled import STEP_WEIGHT, HeadLoss, Objective

VOCAB, LAYERS, K, SEQ = 40, (0, 1), 4, 20
SOME_IDS = torch.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def target() -> Decoder:
    """A target as training has it. Its weights are random and large, so that arg-maxes differ clearly."""
    spec = llama_spec(VOCAB, 3, hidden_size=64, intermediate_size=96, head_dim=16, num_heads=4, num_kv_heads=2)
    decoder = initialise(Decoder(spec), seed=0)
    for parameter in decoder.parameters():
        parameter.data.mul_(8.0 if parameter.ndim == 2 else 1.0)
    return decoder.requires_grad_(False)


def make_head(target: Decoder, ids: Tensor = SOME_IDS, seed: int = 1) -> Eagle3Head:
    torch.manual_seed(seed)
    return new_head(target, LAYERS, ids).train()


def training_batch(target: Decoder, batch: int = 3, seed: int = 2) -> TrainingBatch:
    ids = torch.randint(VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(seed))
    return make_training_batch(target, LAYERS, ids)


@torch.no_grad()
def chain(head: Eagle3Head, captured: Tensor, tokens: Tensor, passes: int) -> list[Tensor]:
    """Run a chain as inference does, and return the last row of each pass, [H].
    One pass over rows 0..p of the target's states, captured [p + 1, n * H], fills a paged cache. Then one row is run at
    a time. tokens [>= p + passes]: the token after each row, then after each row of the chain."""
    rows = len(captured)
    kv = allocate_layers(head.spec.layer.kv_layers, num_blocks=4, block_size=16, dtype=torch.float32)
    attend = PagedAttend(AttnMetadata.of([rows], [rows], [[1, 2, 3]]), kv, head.spec.layer.windows)
    positions = attend.attn.positions(rows)
    h = head(tokens[:rows], head.fuse(captured), positions, attend)[-1:]
    outputs = [h[0]]
    for j in range(1, passes):
        attend = attend.at(attend.attn.advance())
        h = head(tokens[rows - 1 + j][None], h, attend.attn.positions(1), attend)
        outputs.append(h[0])
    return outputs


# -- the unrolled passes ----------------------------------------------------------------------------------------------


def test_unrolled_training_is_inference_with_a_cache(target: Decoder) -> None:
    head = make_head(target)
    inputs, *_, captured, _ = given = training_batch(target)
    following = inputs.roll(-1, dims=1)
    passes: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, arguments, output: passes.append(output.detach()))
    HeadLoss(head, target, K, torch.float32)(*given)
    hook.remove()
    assert len(passes) == K
    moved = 0.0
    for b in range(len(inputs)):
        for p in range(SEQ - K):
            expected = chain(head.eval(), captured[b, : p + 1], following[b], K)
            for j in range(K):
                ours = passes[j].view(*inputs.shape, -1)[b, p]
                torch.testing.assert_close(ours, expected[j], atol=1e-5, rtol=0, msg=f"row {p}, pass {j}")
            moved = max(moved, float((expected[1] - expected[0]).abs().max()))
    assert moved > 0.1


def test_loss_and_agreement_are_those_of_the_definition(target: Decoder) -> None:
    """Pass j at row p should predict what the target predicts after p + 1 + j, if the draft vocabulary and the window
    have it. Agreement counts only chains that are wholly within the window."""
    head, hard = make_head(target), 0.3
    inputs, *_, captured, last = given = training_batch(target)
    following = inputs.roll(-1, dims=1)
    loss = HeadLoss(head, target, K, torch.float32, objective=Objective(hard=hard))
    found = loss(*given)

    wanted = target.logits(last.flatten(0, 1)).view(*inputs.shape, -1)
    total, hits = 0.0, [[[True] * SEQ for _ in inputs] for _ in range(K)]
    for j in range(K):
        terms = []
        for b, p in ((b, p) for b in range(len(inputs)) for p in range(SEQ - 1 - j)):
            y = chain(head.eval(), captured[b, : p + 1], following[b], j + 1)[j]
            log_probs = head.logits(y[None])[0].log_softmax(-1)
            best = int(wanted[b, p + 1 + j].argmax())
            said = int(head.target_ids[log_probs.argmax()])
            hits[j][b][p] = said == best and (j == 0 or hits[j - 1][b][p])
            if best not in SOME_IDS.tolist():
                continue
            soft = wanted[b, p + 1 + j][SOME_IDS].softmax(-1)
            terms.append(hard * log_probs[SOME_IDS.tolist().index(best)] + (1 - hard) * (soft * log_probs).sum())
        assert 0 < len(terms) < len(inputs) * (SEQ - 1 - j)
        total -= STEP_WEIGHT**j * float(torch.stack(terms).detach().mean())
    assert float(found.detach()) == pytest.approx(total / sum(STEP_WEIGHT**j for j in range(K)), abs=1e-4)
    assert loss.agreement.tolist() == pytest.approx([np.mean([row[: SEQ - K] for row in of_pass]) for of_pass in hits])
    assert loss.metrics()["acceptance_length"] == pytest.approx(1 + float(loss.agreement.sum()))


def test_texts_of_a_window_do_not_see_each_other(target: Decoder) -> None:
    """A window of three texts has the loss of its texts alone, and rows that are not to be taught count nothing."""
    head = make_head(target)
    ids = torch.randint(VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(3))
    cuts = ((0, 9), (9, 17), (17, SEQ))
    places = torch.cat([torch.arange(end - start) for start, end in cuts])[None]
    taught = torch.rand(1, SEQ, generator=torch.Generator().manual_seed(4)) < 0.7
    packed = make_training_batch(target, LAYERS, ids, places, taught)
    loss = HeadLoss(head, target, 2, torch.float32)
    alone, weights = [], []
    for start, end in cuts:
        one = make_training_batch(target, LAYERS, ids[:, start:end], taught=taught[:, start:end])
        for name in ("best", "captured", "last"):
            torch.testing.assert_close(getattr(packed, name)[:, start:end], getattr(one, name), atol=1e-5, rtol=0)
        for j in range(2):  # for each pass by itself, as passes count different numbers of rows
            known = one.taught[:, 1 + j :] & (head.draft_ids[one.best[:, 1 + j :]] >= 0)
            weights.append((j, int(known.sum())))
        alone.append(one)
    whole = [float(part) for part in losses_of_passes(loss, packed)]
    parts = [[float(part) for part in losses_of_passes(loss, one)] for one in alone]
    for j in range(2):
        rows = [count for pass_, count in weights if pass_ == j]
        assert sum(rows) > 3
        expected = sum(count * part[j] for count, part in zip(rows, parts, strict=True)) / sum(rows)
        assert whole[j] == pytest.approx(expected, abs=1e-4)


def losses_of_passes(loss: HeadLoss, training_batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Losses of each of two passes: that of both is (first + 0.8 second) / 1.8, and that of one pass is the first."""
    first = HeadLoss(loss.head, loss.target, 1, torch.float32)(*training_batch).detach()
    both = loss(*training_batch).detach()
    return first, (both * (1 + STEP_WEIGHT) - first) / STEP_WEIGHT


def test_nothing_to_teach_is_a_loss_of_nothing(target: Decoder) -> None:
    head, one = make_head(target), training_batch(target)
    loss = HeadLoss(head, target, K, torch.float32)
    found = loss(*one._replace(taught=torch.zeros_like(one.taught)))
    found.backward()
    assert float(found.detach()) == 0.0
    assert all(not parameter.grad.any() for parameter in head.parameters() if parameter.grad is not None)
    assert loss.metrics()["acceptance_length"] == 1.0


def test_blocks_change_nothing(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and its gradients are the same whatever the size of a block."""
    found = []
    for size in (7, 256):
        monkeypatch.setattr("trtspec.train.cross_entropy.MOST_ROWS", size)
        head = make_head(target)
        loss = HeadLoss(head, target, K, torch.float32)
        value = loss(*training_batch(target))
        value.backward()
        grads = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        found.append((value.detach(), grads, loss.agreement))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_gradients_reach_the_head_alone(target: Decoder) -> None:
    head = make_head(target)
    HeadLoss(head, target, K, torch.float32)(*training_batch(target)).backward()
    trained = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in head.named_parameters() if not name.startswith("embedding")}
    assert all(parameter.grad is None for parameter in target.parameters())


def test_a_quantised_lm_head_is_where_the_head_s_begins(target: Decoder) -> None:
    """A head's lm_head begins as the target's quantised one, and is taught with it."""
    quantised = copy.deepcopy(target)
    quantised.head.pack("int8")
    plain, held = make_head(target), make_head(quantised)
    step = target.head.weight.detach().abs().amax(1)[SOME_IDS] / 127
    gap = (plain.head.weight - held.head.weight).detach().abs().amax(1)
    assert float(gap.max()) > 0
    assert bool((gap <= 0.51 * step).all())
    one = training_batch(quantised)
    found = HeadLoss(held, quantised, K, torch.float32)(*one)
    found.backward()
    assert float(found.detach()) == pytest.approx(
        float(HeadLoss(plain, target, K, torch.float32)(*training_batch(target)).detach()), abs=0.2
    )


def test_a_few_steps_learn(target: Decoder, tmp_path: Path) -> None:
    head, source = make_head(target), training_batch(target)

    class Fixed:
        def batch(self, index: int) -> tuple[Tensor, ...]:
            return source

    loss = HeadLoss(head, target, K, torch.float32)
    before = float(loss(*source).detach())
    Trainer(head, loss, [Stage(1.0, (Fixed(),))], TrainConfig(steps=30, warmup_steps=5), tmp_path).run()
    assert float(loss(*source).detach()) < before - 1.0


def test_frequent_tokens_come_in_order_and_ties_go_to_the_lower_id() -> None:
    tokens = np.array([5, 5, 5, 1, 1, 7, 2], dtype=np.uint16)
    assert frequent_tokens(tokens, 10, 3).tolist() == [1, 2, 5]
    assert frequent_tokens(tokens, 10, 10).tolist() == list(range(10))
    for count in (0, 11):
        with pytest.raises(ConfigError, match="use 1 to that many"):
            frequent_tokens(tokens, 10, count)


# -- simulated acceptance ---------------------------------------------------------------------------------------------


def test_simulated_acceptance_is_that_of_chains_run_one_by_one(target: Decoder) -> None:
    """The head was trained a little, so that chains break at every position."""
    head = make_head(target, torch.arange(VOCAB))
    prompts = torch.randint(VOCAB, (6, 8), generator=torch.Generator().manual_seed(4))
    text = continue_windows(target.eval(), prompts, 24).reshape(6, -1)
    ids = torch.from_numpy(text.astype(np.int64))
    teach = make_training_batch(target, LAYERS, ids)
    loss = HeadLoss(head, target, 3, torch.float32)
    optimizer = torch.optim.Adam([p for n, p in head.named_parameters() if not n.startswith("embedding")], 2e-3)
    for _ in range(12):
        optimizer.zero_grad()
        loss(*teach).backward()
        optimizer.step()

    counts = []
    for b in range(6):
        p = prompts.shape[1] - 1
        while p + 3 + 2 < (32, 32, 29, 32, 26, 32)[b]:
            drafts: list[int] = []
            tokens = ids[b, 1 : p + 2]
            for _ in range(3):
                known = torch.cat((tokens, torch.tensor(drafts).long()))
                y = chain(head.eval(), teach.captured[b, : p + 1], known, len(drafts) + 1)
                drafts.append(int(head.target_ids[head.logits(y[-1][None])[0].argmax()]))
            kept = 0
            while kept < 3 and drafts[kept] == ids[b, p + 2 + kept]:
                kept += 1
            counts.append(kept)
            p += kept + 1
    lengths = [32, 32, 29, 32, 26, 32]  # the last tokens of some are cut off
    texts = [(row[:length].tolist(), prompts.shape[1]) for row, length in zip(text, lengths, strict=True)]
    found = HeldOut(target, LAYERS, texts, 3, batch_size=4).acceptance(head)
    assert found.steps == len(counts)
    assert found.length == pytest.approx(1 + np.mean(counts))
    assert found.per_position == pytest.approx([np.mean([kept > j for kept in counts]) for j in range(3)])
    assert 0 < found.per_position[2] < found.per_position[0] < 1
    with pytest.raises(ConfigError, match="too short to check 3 drafts"):
        HeldOut(target, LAYERS, [(row[:12].tolist(), 8) for row in text], 3)


# -- runs -------------------------------------------------------------------------------------------------------------


def options(tmp_path: Path, **changes: Any) -> Eagle3Options:
    fields = {
        "target": tmp_path / "t", "data": (tmp_path / "d",), "out": tmp_path / "o", "run": tmp_path / "r", "steps": 2
    }  # fmt: skip
    return Eagle3Options(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, r"data=\(\) is empty"),
        ({"unroll": 0}, "unroll=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"regenerate_len": 0}, "regenerate_len=0 must be at least 1"),
        ({"regenerate": 7}, "regenerate=7 make no batch_size=8; use at least as many, or 0"),
        ({"regenerate_temperature": -1.0}, "regenerate_temperature=-1.0 must not be negative"),
        ({"states_gib": float("nan")}, "states_gib=nan must not be negative"),
        ({"seq_len": 5}, "seq_len=5 must exceed unroll"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be at least 1"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be positive"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds=-1 must not be negative"),
        ({"dtype": "int8"}, "dtype='int8'; use one of"),
        ({"steps": None}, "give exactly one of them"),
        ({"steps": 0}, "must be positive"),
        ({"minutes": 1.0}, "give exactly one of them"),
        ({"held_out": Path("x"), "regenerate_len": 5}, "regenerate_len=5 is too short to measure unroll=4"),
    ],
)
def test_options_are_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(tmp_path, **changes)


def test_a_run_folder_belongs_to_its_options_once_something_is_trained(tmp_path: Path) -> None:
    first = options(tmp_path)
    _remember(first)
    run = first.run
    for name in ("tokens.npy", "regenerated.npy", "conversations.npy", "held_out.json"):
        (run / name).write_bytes(b"made from the data")
    for name in ("regenerate", "states"):
        (run / name).mkdir()
    _remember(replace(first, states_gib=1.0, checkpoint_seconds=1.0, out=tmp_path / "x", held_out=tmp_path / "h"))
    assert len(list(run.iterdir())) == 7
    _remember(replace(first, seed=1))  # nothing was trained: what was made of the data is made anew
    assert [file.name for file in run.iterdir()] == ["options.json"]
    (run / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds a run with another seed \(seed=1\)"):
        _remember(first)
    old = json.loads((run / "options.json").read_text())
    for name in ("held_out", "checkpoint_seconds", "states_gib"):
        del old[name]
    (run / "options.json").write_text(json.dumps(old))
    _remember(replace(first, seed=1))  # a run of an earlier version goes on
    (run / "options.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        _remember(first)


def test_an_interrupt_ends_the_step_saves_and_resumes(target: Decoder, tmp_path: Path) -> None:
    def make(folder: Path, at: int = 0) -> Trainer:
        def after_step(step: int, loss: float) -> None:
            if step == at:
                signal.raise_signal(signal.SIGINT)
                assert trainer.step == at  # no exception yet

        head = make_head(target)
        loss = HeadLoss(head, target, K, torch.float32)
        config = TrainConfig(steps=8, log_every=1)
        trainer = Trainer(head, loss, [Stage(1.0, (Random(),))], config, folder, after_step=after_step)
        return trainer

    class Random:
        def batch(self, index: int) -> TrainingBatch:
            return training_batch(target, 2, index)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts", at=5).run()
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = make(tmp_path / "parts")
    assert resumed.step == 5
    resumed.run()
    make(tmp_path / "whole").run()
    parts, whole = (tmp_path / name / "metrics.jsonl" for name in ("parts", "whole"))
    for ours, theirs in zip(read(parts), read(whole), strict=True):
        assert (ours["step"], ours["loss"]) == (theirs["step"], theirs["loss"])


def test_a_run_killed_before_its_first_checkpoint_logs_every_step_once(target: Decoder, tmp_path: Path) -> None:
    tmp_path.joinpath("metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "los')
    head = make_head(target)
    loss = HeadLoss(head, target, K, torch.float32)

    class Fixed:
        def batch(self, index: int) -> tuple[Tensor, ...]:
            return training_batch(target)

    Trainer(head, loss, [Stage(1.0, (Fixed(),))], TrainConfig(steps=2, log_every=1), tmp_path).run()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def read(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_a_curve_is_drawn_or_the_missing_package_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "metrics.png"
    line = '{"step": %d, "loss": 2.0, "smooth": 2.1, "acceptance_length": 1.5}\n'
    metrics.write_text("".join(line % step for step in (1, 10)))
    plot_metrics(metrics, png)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.png"]
    metrics.write_text("")
    plot_metrics(metrics, png)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r'pip install "trtspec\[bench\]"'):
        plot_metrics(metrics, png)
