"""Runs of `trtspec train` for tests: their data, their metrics, and processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.e2e.tiny import VOCAB
from trtspec.models.decoder import Decoder
from trtspec.train.training_batches import TrainingBatch, best_ids, observe


def random_ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, count).astype(np.uint16)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "trtspec", *command], env=environment, stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, text=True)  # fmt: skip


def wait_for(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until there is the checkpoint of a step >= `step`."""
    deadline = time.monotonic() + 120
    while not any(int(path.stem.split("-")[1]) >= step for path in run.glob("step-*.pt")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_training_batch(
    target: Decoder,
    capture: Sequence[int],
    inputs: Tensor,
    places: Tensor | None = None,
    taught: Tensor | None = None,
) -> TrainingBatch:
    """Batch of the windows [B, S] with the target's outputs.

    By default each window is one text, and all its tokens are taught.
    """
    if places is None:
        places = torch.arange(inputs.shape[1]).expand_as(inputs)
    if taught is None:
        taught = torch.ones_like(inputs, dtype=torch.bool)
    captured, last = observe(target.train(), capture, inputs, places)
    return TrainingBatch(inputs, places, taught, best_ids(target, last), captured, last)
