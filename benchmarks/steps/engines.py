"""Inputs of the measurements: checkpoints, EAGLE3 heads of random weights, engine folders.

They are kept, and made again when their own inputs change.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.checkpoints import Model, made, open_model
from trtspec.build.sources import DIGITS, PACKAGE, build_code, digest, engine_digest
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.capture import default_capture_layers
from trtspec.methods.eagle3.train import export_eagle3, new_head
from trtspec.models.weights import load_decoder

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Workshop:
    """A maker of checkpoints, heads and engines under `work`. report: called with each thing that takes long."""

    work: Path
    report: Callable[[str], None]

    def model(self, name: str) -> Model:
        """One of peers.checkpoints.MODELS."""
        return open_model(name, self.work / "checkpoints")

    def head(self, model: Model, draft_vocab: int) -> Path:
        """Return the folder of an EAGLE3 head of random weights for `model` that drafts from `draft_vocab` ids."""
        folder = self.work / "checkpoints" / f"{model.name}-eagle3-{draft_vocab}"
        settings = [draft_vocab, inspect.getsource(write_head), str(torch.__version__)]
        code = [*build_code(), *sorted((PACKAGE / "train").glob("*.py"))]

        def write(staging: Path) -> None:
            self.report(f"writing {folder}")
            write_head(model.folder, staging, draft_vocab)

        return made(folder, digest(settings, [model.folder], code), write)

    def engine(self, name: str, checkpoint: Path, speculation: dict[str, Any] | None, **limits: int) -> Path:
        """Return a compiled engine folder and delete an older one of that name. limits: options of `trtspec build`."""
        engines = self.work / "engines"
        folder = engines / f"{name}-{engine_digest(checkpoint, speculation, limits)}"
        if folder.is_dir():
            return folder
        for older in engines.glob(f"{name}-" + "?" * DIGITS):
            shutil.rmtree(older)
        self.report(f"building {folder}")
        command = [sys.executable, "-m", "trtspec", "build"]  # a process, as its threads and memory end with it
        command += ["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder)]
        if speculation is not None:
            command += ["--spec", json.dumps(speculation)]
        for option, value in limits.items():
            command += [f"--{option}", str(value)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return folder


def environment(**more: str) -> dict[str, str]:
    """Environment of a process that must run this code, whatever package is installed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def write_head(target: Path, folder: Path, draft_vocab: int, seed: int = 0) -> None:
    """Write an untrained head of one layer of the target's shape, in the public layout (bf16), d2t and t2d included.

    The head's ids are spread evenly over the target's.
    """
    config = ModelConfig.from_folder(target)
    capture = default_capture_layers(config.num_layers)
    ids = torch.arange(draft_vocab) * config.vocab_size // draft_vocab
    torch.manual_seed(seed)
    head = new_head(load_decoder(config, torch.bfloat16), capture, ids)
    export_eagle3(head, config, capture, folder)
