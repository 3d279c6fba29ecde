"""Starts of an engine in a fresh process, measured from outside; benchmarks/steps/child.py is that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.steps.engines import environment


@dataclass(frozen=True)
class Start:
    """One start, in seconds and bytes."""

    cold: bool  # the engine's files were dropped from the page cache before, if the system does so
    import_s: float  # time to import trtspec, before the constructor
    constructor_s: float
    first_token_s: float  # from the call of the constructor
    import_rss: int  # peak, once trtspec is imported
    peak_rss: int  # once the first token is there
    weight_bytes: int  # of the weights files, all of which are held in memory
    kv_bytes: int  # of the KV pool

    @property
    def overhead(self) -> int:
        """Peak memory beyond weights and KV pool."""
        return self.peak_rss - self.weight_bytes - self.kv_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.overhead}


def start(engine: str, prompt: list[int], threads: int, cold: bool) -> Start:
    """Load the engine folder in a new process and wait for the first token after `prompt`."""
    if cold:
        forget_files(Path(engine))
    command = [sys.executable, "-m", "benchmarks.steps.child", engine]
    own = environment(OMP_NUM_THREADS=str(threads))
    done = subprocess.run(command, input=json.dumps(prompt), env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return Start(cold=cold, weight_bytes=weight_file_bytes(Path(engine)), **json.loads(done.stdout.splitlines()[-1]))


def weight_file_bytes(engine: Path) -> int:
    """Bytes of all weights files in an engine folder."""
    return sum(file.stat().st_size for file in engine.glob("*/weights.safetensors"))


def forget_files(folder: Path) -> None:
    """Ask the system to drop the folder's files from memory; they are written to disk first."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
