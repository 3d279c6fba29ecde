"""Key of a compiled engine: a digest of everything the engine results from, computed again in milliseconds."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtspec.backends.table import USUAL_COMPILER
from trtspec.build.context import BuildContext
from trtspec.build.engine_folder import graph_options, machine, sha256
from trtspec.build.sources import PACKAGE
from trtspec.config.speculation_plan import SpeculationPlan, scheduled_draft_lens
from trtspec.models.weights import weight_files
from trtspec.ops import kernel_interface

DIGITS = 24
"""Number of hex digits of a key."""

_TEXTS = ("*.json", "*.jinja", "additional_chat_templates/*")
"""Files of a checkpoint other than weights: configs, tokenizer, chat templates."""
_SETTLED = 2.0  # seconds: a file written just now may change again within a tick of the file system's clock
_LARGE = 2**30  # bytes: takes a second or so to read

Stamp = list[int]
"""Device, inode, size in bytes, and times in ns of the last change of the contents and of the inode."""


class Digests:
    """Digests of files, stored in `file` by path. A stored digest is valid while the stamp of its file is the same."""

    def __init__(self, file: Path, report: Callable[[str], None] = lambda what: None) -> None:
        """Load the stored digests. report: is called for files that take a while to read."""
        self.file, self.report = file, report
        self._known: dict[str, Any] = {}
        self._new = False
        with suppress(OSError, ValueError):  # without them, every file is read again
            data = json.loads(file.read_text(encoding="utf-8"))
            self._known = data if isinstance(data, dict) else {}

    def of(self, file: Path) -> str:
        """SHA-256 of the file's contents."""

        def read() -> str:
            if file.stat().st_size > _LARGE:
                self.report(f"reading {file}, once, to know it again")
            return sha256(file)

        return self._remembered(file, "", read)

    def version(self, program: Path) -> str:
        """First line that a compiler prints for --version, "" if it prints nothing."""

        def ask() -> str:
            try:
                done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
            except (OSError, subprocess.SubprocessError):
                return ""
            return done.stdout.partition("\n")[0]

        return self._remembered(program, "--version ", ask)

    def save(self) -> None:
        """Store the digests for the next process, as a whole or not at all. A failure is ignored, as it does no harm.

        Digests of files that no longer exist are dropped.
        """
        if not self._new:
            return
        known = {name: held for name, held in self._known.items() if os.path.exists(name.removeprefix("--version "))}
        with suppress(OSError):
            descriptor, written = tempfile.mkstemp(dir=self.file.parent, prefix=f"{self.file.name}-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as target:
                    json.dump(known, target)
                os.replace(written, self.file)
            except OSError:
                os.unlink(written)
                raise
        self._new = False

    def _remembered(self, file: Path, what: str, find: Callable[[], str]) -> str:
        name, now = f"{what}{file.absolute()}", stamp(file)
        held = self._known.get(name)
        if isinstance(held, list) and held[:-1] == now and isinstance(held[-1], str):
            return held[-1]
        found = find()
        if stamp(file) == now and time.time() - max(now[-2:]) / 1e9 > _SETTLED:
            self._known[name], self._new = [*now, found], True
        return found


def stamp(file: Path) -> Stamp:
    """Return a file's stamp, which changes when its contents do, without reading the contents."""
    found = file.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def checkpoint_files(context: BuildContext) -> dict[str, list[Path]]:
    """All files that are read of the checkpoints, by role. CheckpointError if weights are missing."""
    models: dict[str, Path] = {"target": context.target.path}
    if context.shapes_graphs and context.draft is not None:
        models["draft"] = context.draft.path
    found = {}
    for role, folder in models.items():
        texts = {file for pattern in _TEXTS for file in folder.glob(pattern) if file.is_file()}
        found[role] = sorted({*texts, *weight_files(folder, role)})
    return found


def stamps(context: BuildContext) -> list[Stamp]:
    """Stamps of all files of the checkpoints. If they are equal, no file has changed."""
    return [stamp(file) for files in checkpoint_files(context).values() for file in files]


def compiler(digests: Digests) -> tuple[str, str] | None:
    """Path and version of the C++ compiler that torch would call; None if there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    return None if found is None else (found, digests.version(Path(found).resolve()))


def key_facts(context: BuildContext, digests: Digests, cxx: tuple[str, str]) -> dict[str, Any]:
    """All that decides what is compiled, as JSON.

    Modes that draft on the host share the graphs of plain decoding. Limits are not included: graphs take any, and
    rotary tables are made for the checkpoint's own length.
    """
    return {
        "checkpoints": {
            role: {file.name: digests.of(file) for file in files} for role, files in checkpoint_files(context).items()
        },
        "options": {**graph_options(context.config), "dtype": str(context.dtype).removeprefix("torch.")},
        "speculation": in_graphs(context.spec_plan),
        "vocabulary": context.vocabulary is not None,
        "machine": machine(USUAL_COMPILER),
        "torch": [torch.__version__, torch.version.git_version, torch.backends.cpu.get_cpu_capability()],
        "sources": source_digest(),
        "kernels": kernel_interface(),
        "instruction_set": os.environ.get("TRTSPEC_CPU_ISA", ""),
        "compiler": list(cxx),
    }


def key_of(facts: Mapping[str, Any]) -> str:
    """Key of an engine with these facts: DIGITS hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGITS]


@functools.cache
def source_digest() -> str:
    """Digest of every module of this package, whatever its purpose."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(repr((file.relative_to(PACKAGE).as_posix(), file.read_bytes())).encode())
    return digest.hexdigest()


def in_graphs(spec_plan: SpeculationPlan | None) -> dict[str, Any] | None:
    """Settings of speculation that graphs depend on; all others apply at run time."""
    if spec_plan is None or not spec_plan.shapes_graphs:
        return None
    drafts = spec_plan.mode.use_one_engine() or spec_plan.mode.has_draft_model()
    return {
        "mode": spec_plan.mode.name,
        "draft_lens": sorted(scheduled_draft_lens(spec_plan)),
        "scores": spec_plan.chooses_draft_len,
        "tree": None if spec_plan.tree is None else asdict(spec_plan.tree),
        "quantization": spec_plan.quantization,
        "capture_layers": spec_plan.capture_layers,
        "mask_token_id": spec_plan.mask_token_id,
        "draft_sample_method": spec_plan.draft_sample_method,
        "draft_confidence_threshold": spec_plan.draft_confidence_threshold,
        "options": asdict(spec_plan.options) if drafts else None,
    }
