"""What is measured: checkpoints, EAGLE3 heads of random weights, engine folders. Made when missing, then kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.checkpoints import Model, open_model
from trtspec.config.capture import default_capture_layers
from trtspec.config.model import ModelConfig
from trtspec.models.weights import load_decoder
from trtspec.train.eagle3 import new_head
from trtspec.train.eagle3_run import export_eagle3

ROOT = Path(__file__).resolve().parents[2]
# What decides how an engine is compiled and packed: changing anything else keeps it.
INGREDIENTS = (
    *(f"trtspec/{folder}/*.py" for folder in ("backends", "config", "drafters", "models", "ops", "verify", "workers")),
    *(f"trtspec/{file}.py" for file in ("core", "modes", "engine/assemble", "engine/build")),
    "plugins/**/*.py",
    "plugins/**/*.cpp",
    "plugins/**/*.h",
)
DIGITS = 12


@dataclass(frozen=True)
class Workshop:
    """Makes things under `work`. report hears what takes long."""

    work: Path
    report: Callable[[str], None]

    def model(self, name: str) -> Model:
        """One of peers.checkpoints.MODELS."""
        return open_model(name, self.work / "checkpoints")

    def head(self, model: Model, draft_vocab: int) -> Path:
        """An EAGLE3 head of random weights for `model` that draws from `draft_vocab` ids."""
        folder = self.work / "checkpoints" / f"{model.name}-eagle3-{draft_vocab}"
        if not folder.is_dir():
            self.report(f"writing {folder}")
            write_head(model.folder, folder, draft_vocab)
        return folder

    def engine(self, name: str, checkpoint: Path, speculation: dict[str, Any] | None, **limits: int) -> Path:
        """A compiled engine folder; `limits` are options of `trtspec build`. An older one of that name goes."""
        sources = [checkpoint] if speculation is None else [checkpoint, Path(speculation["model"])]
        engines = self.work / "engines"
        folder = engines / f"{name}-{digest([speculation, limits], sources)}"
        if folder.is_dir():
            return folder
        for older in engines.glob(f"{name}-" + "?" * DIGITS):
            shutil.rmtree(older)
        self.report(f"building {folder}")
        command = [sys.executable, "-m", "trtspec", "build"]  # whose threads and memory end with it
        command += ["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder)]
        if speculation is not None:
            command += ["--spec", json.dumps(speculation)]
        for option, value in limits.items():
            command += [f"--{option}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return folder


def write_head(target: Path, folder: Path, draft_vocab: int, seed: int = 0) -> None:
    """An untrained head of one layer of the target's shape, in the public layout (bf16), d2t and t2d included.

    Its ids are spread evenly over the target's. Nothing is at `folder` until all of it is.
    """
    config = ModelConfig.from_folder(target)
    capture = default_capture_layers(config.num_layers)
    ids = torch.arange(draft_vocab) * config.vocab_size // draft_vocab
    torch.manual_seed(seed)
    head = new_head(load_decoder(config, torch.bfloat16), capture, ids)
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    export_eagle3(head, config, capture, staging)
    staging.rename(folder)


def digest(settings: Any, sources: list[Path]) -> str:
    """Of the settings, the files of the folders `sources` (by size and time) and the code that compiles."""
    found = hashlib.sha256(json.dumps([settings, str(torch.__version__)], sort_keys=True).encode())
    for folder in sources:
        for file in sorted(folder.iterdir()):
            facts = file.stat()
            found.update(repr((file.name, facts.st_size, facts.st_mtime_ns)).encode())
    for file in ingredients():
        found.update(file.read_bytes())
    return found.hexdigest()[:DIGITS]


def ingredients() -> Iterator[Path]:
    """The files that INGREDIENTS name."""
    for pattern in INGREDIENTS:
        yield from sorted(ROOT.glob(pattern))
