"""A small trainer that can be killed at any moment and started again with the same arguments."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trtspec.errors import ConfigError
from trtspec.train.arithmetic import fast_dtype
from trtspec.train.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from trtspec.train.language_model import LossFn
from trtspec.train.muon import Muon
from trtspec.train.report import Report
from trtspec.train.threads import Threads


class Source(Protocol):
    """A source of batches. A batch depends on its index alone, so that a run can be resumed."""

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Return the loss function's arguments, inputs [B, S] first."""
        ...


@dataclass(frozen=True)
class Stage:
    """A part of a run, up to `until` (a fraction of the run), with its sources of batches.

    The sources supply one batch each, in turn. `micro_batches` batches make one optimizer step.
    """

    until: float
    sources: tuple[Source, ...]
    micro_batches: int = 1


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run.

    Exactly one of `steps` (optimizer steps) and `minutes` (time spent training) sets the length of the run.

    Learning rates warm up over the first `warmup_steps` and then stay. From `decay_from` (a fraction of the run) on,
    they fall linearly to a twentieth. Muon trains the matrices with `matrix_lr`, AdamW embeddings and norms with
    `other_lr`.
    """

    steps: int | None = None
    minutes: float | None = None
    matrix_lr: float = 4e-3
    other_lr: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    decay_from: float = 0.5
    clip_norm: float = 1.0
    checkpoint_seconds: float = 60.0
    log_every: int = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError(f"steps={self.steps}, minutes={self.minutes}: give exactly one of them")
        length = self.steps if self.minutes is None else self.minutes
        if length is not None and length <= 0:
            raise ConfigError(f"steps={self.steps}, minutes={self.minutes}: the run's length must be positive")

    def progress(self, step: int, seconds: float) -> float:
        """Fraction of the run that is over, 0 to 1, after `step` steps and `seconds` of training."""
        done = step / self.steps if self.steps is not None else seconds / (60.0 * (self.minutes or 1.0))
        return min(done, 1.0)

    def lr_scale(self, step: int, progress: float) -> float:
        """Common factor of the learning rates for the step after `step` steps, (0, 1]."""
        rise = (step + 1) / self.warmup_steps if step < self.warmup_steps else 1.0
        fall = min(1.0, (1.0 - progress) / (1.0 - self.decay_from)) if self.decay_from < 1 else 1.0
        return min(rise, max(fall, 0.05))


class Trainer:
    """A trainer of `model` on `loss_fn` over `stages`; its whole persistent state is in `folder`.

    `before_step(progress)` is called before every optimizer step, `after_step(step, loss)` after it. `metrics()` adds
    fields to the log's lines and to the bar.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        stages: Sequence[Stage],
        config: TrainConfig,
        folder: Path,
        label: str = "training",
        after_step: Callable[[int, float], None] | None = None,
        metrics: Callable[[], dict[str, float]] = dict,
        before_step: Callable[[float], None] = lambda progress: None,
    ) -> None:
        if not stages or stages[-1].until < 1.0:
            raise ConfigError("the last stage must reach until=1.0, or the run's end has no data")
        self.model, self.loss_fn, self.stages, self.config = model, loss_fn, tuple(stages), config
        self.folder, self.label, self.after_step, self.metrics = folder, label, after_step, metrics
        self.before_step = before_step
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            hidden = parameter.ndim == 2 and "embedding" not in name and "head" not in name
            (matrices if hidden else others).append(parameter)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, config.matrix_lr, config.weight_decay, fast_dtype()),
            torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.batches_drawn = [0] * len(self.stages)
        self.loss = float("nan")  # running mean over about 20 steps
        self._restore()

    @property
    def progress(self) -> float:
        return self.config.progress(self.step, self.seconds)

    def run(self, pause_at: float = 1.0) -> None:
        """Train until `progress` reaches `pause_at`, then save. Return at once if it has reached this already.

        After Ctrl-C, the step in progress ends, the state is saved, and only then KeyboardInterrupt is raised.
        """
        if self.progress >= pause_at:
            return
        self.model.train()
        saved = clock = time.monotonic()
        with _interrupts() as interrupted, Report(self.label) as report, Threads() as threads:
            while self.progress < pause_at and not interrupted.is_set():
                started, before = self.progress, self.tokens
                threads.begin()
                loss, waited = self._step(started)
                now = time.monotonic()
                elapsed, clock = now - clock, now
                self.seconds += elapsed
                self.loss = loss if self.step == 1 or self.loss != self.loss else 0.95 * self.loss + 0.05 * loss
                speed = (self.tokens - before) / elapsed
                threads.end((self.tokens - before) / (elapsed - waited))
                self._log(loss, speed, started)
                extra = "".join(f" · {name.replace('_', ' ')} {value:.2f}" for name, value in self.metrics().items())
                state = f"step {self.step} · loss {self.loss:.3f}{extra} · {speed:,.0f} tok/s"
                report.at(self.progress, state)
                if self.after_step is not None:
                    self.after_step(self.step, loss)
                if now - saved >= self.config.checkpoint_seconds:
                    self.save()
                    saved = now
            self.save()
        if self.progress < pause_at:
            raise KeyboardInterrupt

    def save(self) -> None:
        """Write everything that a restart needs."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "batches_drawn": self.batches_drawn,
            "loss": self.loss,
        }
        save_checkpoint(self.folder, self.step, state)

    def _step(self, progress: float) -> tuple[float, float]:
        """Make one optimizer step; return its loss, and the seconds of work that not all steps have.

        This work is `before_step`, and batches that are not there yet.
        """
        begin = time.monotonic()
        self.before_step(progress)
        waited = time.monotonic() - begin
        index = next(i for i, stage in enumerate(self.stages) if progress < stage.until)
        stage = self.stages[index]
        for optimizer, lr in zip(self.optimizers, (self.config.matrix_lr, self.config.other_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * self.config.lr_scale(self.step, progress)
            optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(stage.micro_batches):
            turn, source = divmod(self.batches_drawn[index], len(stage.sources))
            begin = time.monotonic()
            batch = stage.sources[source].batch(turn)
            waited += time.monotonic() - begin
            loss = self.loss_fn(*batch) / stage.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            self.batches_drawn[index] += 1
            self.tokens += batch[0].numel()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        if not norm.isfinite():  # all weights would become NaN, and soon all checkpoints
            raise ConfigError(
                f"the gradients of step {self.step} are not finite; lower the learning rates, or train in another "
                f"dtype. {self.folder} keeps the last good checkpoint"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return total, waited

    def _restore(self) -> None:
        state: dict[str, Any] | None = load_checkpoint(self.folder)
        if state is not None:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            torch.set_rng_state(state["rng"])
            self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
            self.batches_drawn, self.loss = state["batches_drawn"], state["loss"]
        if self.metrics_file.is_file():  # drop the steps after the checkpoint: they will run, and be logged, again
            kept = [line for line in self.metrics_file.read_text().splitlines() if _step_of(line) <= self.step]
            write_atomically(self.metrics_file, "".join(line + "\n" for line in kept).encode())

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _log(self, loss: float, tokens_per_second: float, progress: float) -> None:
        if self.step % self.config.log_every and self.step > 1:
            return
        line = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "loss": round(loss, 4),
            "smooth": round(self.loss, 4),
            "lr_scale": round(self.config.lr_scale(self.step - 1, progress), 4),
            "tok_s": round(tokens_per_second),
            **{name: round(value, 4) for name, value in self.metrics().items()},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63  # drops a line torn by a kill


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second raises KeyboardInterrupt as usual.

    An interrupt in the middle of an optimizer step would leave half of the weights updated; these must not be saved.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once and loses what came after the last save\n")

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
