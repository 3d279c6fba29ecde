"""A run may be killed at any moment, and resumes with the steps that would have followed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Decoder
from trtspec.train.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from trtspec.train.data import Windows
from trtspec.train.language_model import LanguageModel, distillation_loss, initialise, llama_spec, next_token_loss
from trtspec.train.trainer import Stage, TrainConfig, Trainer

pytestmark = pytest.mark.slow

STEPS = 12


def tiny_decoder(seed: int = 0) -> Decoder:
    return initialise(Decoder(llama_spec(32, 2, hidden_size=32, intermediate_size=48, head_dim=16)), seed)


def tokens() -> np.ndarray:
    return (np.arange(2000) % 31).astype(np.uint16)


def make(folder: Path, after_step=None, **settings) -> Trainer:
    model = LanguageModel(tiny_decoder())
    stages = [
        Stage(0.5, (Windows(tokens(), 16, 4, seed=1), Windows(tokens(), 8, 4, seed=2)), micro_batches=2),
        Stage(1.0, (Windows(tokens(), 32, 2, seed=3),)),
    ]
    config = TrainConfig(**{"steps": STEPS, "warmup_steps": 3, "log_every": 1, "checkpoint_seconds": 0.0} | settings)
    return Trainer(model, next_token_loss(model, torch.float32), stages, config, folder, after_step=after_step)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_told_how_far_the_run_is(tmp_path: Path) -> None:
    trainer, told = make(tmp_path), []
    trainer.before_step = told.append
    trainer.run()
    assert told == [step / STEPS for step in range(STEPS)]


class Killed(Exception):
    pass


def test_it_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.run()
    assert len(losses(tmp_path / "whole")) == STEPS
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.5

    def kill(at: int):
        def after_step(step: int, loss: float) -> None:
            if step == at:
                raise Killed  # before the step's own checkpoint: it must be done again

        return after_step

    for at in (4, 9):  # in the first stage, in the second
        with pytest.raises(Killed):
            make(tmp_path / "parts", kill(at)).run()
    resumed = make(tmp_path / "parts")
    assert resumed.step == 8
    resumed.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_that_are_not_finite_end_the_run_with_good_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    loss_fn = trainer.loss_fn
    trainer.loss_fn = lambda *batch: loss_fn(*batch) * (float("inf") if trainer.step == 5 else 1.0)
    with pytest.raises(ConfigError, match="the gradients of step 5 are not finite; lower the learning rates"):
        trainer.run()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    kept = load_checkpoint(tmp_path)
    assert kept is not None
    assert kept["step"] == 5


def test_a_pause_is_no_different_from_going_on(tmp_path: Path) -> None:
    make(tmp_path / "whole").run()
    make(tmp_path / "parts").run(pause_at=0.25)
    paused = make(tmp_path / "parts")
    assert paused.progress == 0.25
    paused.run(pause_at=0.25)  # nothing left to do
    assert paused.step == 3
    paused.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_truncated_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    make(tmp_path / "whole").run()
    make(tmp_path / "run").run(pause_at=0.5)
    newest = max((tmp_path / "run").glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # torn by the kill
    resumed = make(tmp_path / "run")
    assert resumed.step == 5
    resumed.run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.pt", "step-00000003.pt"]
    assert load_checkpoint(tmp_path) == {"step": 3}
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        load_checkpoint(tmp_path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1})
    with pytest.raises((AttributeError, TypeError)):
        save_checkpoint(tmp_path, 2, {"step": lambda: None})  # cannot be pickled
    assert load_checkpoint(tmp_path) == {"step": 1}


def test_write_atomically_replaces_whole_files(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")
    write_atomically(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_schedule_rises_stays_and_falls() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, decay_from=0.5)
    scales = [config.lr_scale(step, config.progress(step, seconds=1e9)) for step in range(100)]
    assert scales[0] == 0.1
    assert scales[10:50] == [1.0] * 40
    assert scales[50:] == sorted(scales[50:], reverse=True)
    assert scales[75] == pytest.approx(0.5)
    assert scales[-1] == 0.05
    by_time = TrainConfig(minutes=2)
    assert by_time.progress(step=10**6, seconds=30) == 0.25
    assert by_time.progress(step=0, seconds=500) == 1.0


@pytest.mark.parametrize("length", [{}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"minutes": -1.0}])
def test_a_run_has_exactly_one_positive_length(length: dict) -> None:
    with pytest.raises(ConfigError, match="steps="):
        TrainConfig(**length)


def test_stages_must_reach_the_end(tmp_path: Path) -> None:
    model = LanguageModel(tiny_decoder())
    stages = [Stage(0.9, (Windows(tokens(), 16, 4, seed=1),))]
    with pytest.raises(ConfigError, match="last stage"):
        Trainer(model, next_token_loss(model, torch.float32), stages, TrainConfig(steps=1), tmp_path)


def test_distillation_reaches_the_student_alone_and_ends_at_the_teacher() -> None:
    student, teacher = LanguageModel(tiny_decoder(1)).train(), LanguageModel(tiny_decoder(2)).train()
    inputs, targets = Windows(tokens(), 16, 4, seed=1).batch(0)
    loss = distillation_loss(student, teacher, torch.float32, hard=0.0)
    before = loss(inputs, targets)
    before.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    student.load_state_dict(teacher.state_dict())
    assert loss(inputs, targets) < before  # cross-entropy is least where the distributions agree


def test_without_a_terminal_lines_say_how_far_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, steps=4).run()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("training: 25% after 0 s · step 1 · loss ")
    assert lines[-1].startswith("training: 100% after ")
    assert lines[-1].endswith("tok/s")
