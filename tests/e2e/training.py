"""Runs of `trtspec train` for tests: their data, their metrics, and processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.tiny import VOCAB


def random_ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, count).astype(np.uint16)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "trtspec", *command], env=environment, stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, text=True)  # fmt: skip


def wait_for(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until the checkpoint of a step at least `step` is there."""
    deadline = time.monotonic() + 120
    while not any(int(path.stem.split("-")[1]) >= step for path in run.glob("step-*.pt")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
