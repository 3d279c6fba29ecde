"""The demo's compiled engines, kept in build/demo-engines: built if they are missing or their inputs changed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.smollm2.__main__ import HEAD, MODEL
from trtspec.build.build import build_engine
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.sources import DIGITS, engine_digest
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError
from trtspec.interop.reading import read_speculative_config

HERE = Path(__file__).parent
TARGET = HERE / "target"
K = 3
ASSISTANT_K = "auto"  # the engine chooses the number of drafts of each step
CONFIG = EngineConfig(max_batch_size=8)
FOLDER = HERE.parents[1] / "build" / "demo-engines"

# name -> speculation
ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft": {"method": "draft_model", "model": str(HERE / "draft"), "num_speculative_tokens": K},
    "eagle3": {"method": "eagle3", "model": str(HERE / "eagle3"), "num_speculative_tokens": K},
    "medusa": {"method": "medusa", "model": str(HERE / "medusa"), "num_speculative_tokens": K},
    "mtp": {"method": "mtp", "num_speculative_tokens": K},
}
"""Speculation of the engines of the small models, which are shipped."""

ASSISTANT_TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
_HEAD = {"method": "eagle3", "model": str(HEAD), "quantization": "int8"}
ASSISTANT: dict[str, dict[str, Any] | None] = {
    "assistant": None,
    "assistant-eagle3": {**_HEAD, "num_speculative_tokens": ASSISTANT_K},
    "assistant-tree": {**_HEAD, "speculative_token_tree": ASSISTANT_TREE},
}
"""Speculation of the engines of the assistant, which is downloaded."""


def target_of(name: str) -> Path:
    """Checkpoint of an engine. MTP modules come in a checkpoint of their own, with the same target's weights."""
    if name in ASSISTANT:
        return MODEL
    return HERE / "mtp" if name == "mtp" else TARGET


def speculation_of(name: str) -> dict[str, Any] | None:
    """Speculation that an engine is built for."""
    return ASSISTANT[name] if name in ASSISTANT else ENGINES[name]


def build_missing(names: Collection[str], console: Console) -> dict[str, Path]:
    """Name -> folder of each of these engines, after all missing or outdated ones are built."""
    return {name: folder for name, folder, _ in built(names, console)}


def built(names: Collection[str], console: Console) -> Iterator[tuple[str, Path, int]]:
    """Yield the name and the folder of each of these engines as soon as it can be used.

    Missing or outdated ones are built meanwhile, two at a time. The third value is their number at that moment.
    """
    folders = {name: folder_of(name) for name in names}
    missing = [name for name, folder in folders.items() if not usable(folder)]
    with ExitStack() as stack:
        jobs: dict[Future[Path], str] = {}
        if missing:
            pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown, cancel_futures=True)
            jobs = {pool.submit(build, name, folders[name]): name for name in missing}
        yield from ((name, folder, len(jobs)) for name, folder in folders.items() if name not in missing)
        while jobs:
            with console.status(f"compiling engines: {', '.join(jobs.values())} (once; a minute or two)"):
                done, _ = wait(jobs, return_when=FIRST_COMPLETED)
            for job in done:
                console.print(f"compiled {job.result()}", style="dim", highlight=False)
                yield jobs.pop(job), job.result(), sum(not other.done() for other in jobs)


def build(name: str, folder: Path) -> Path:
    """Compile one engine and return its folder. Runs in a process of its own, as compilers keep two cores busy."""
    build_engine(target_of(name), folder, read_speculative_config(speculation_of(name)), CONFIG, replace_existing=True)
    for outdated in set(folder.parent.glob(f"{name}-{'?' * DIGITS}")) - {folder}:
        shutil.rmtree(outdated)
    return folder


def usable(folder: Path) -> bool:
    """Whether the engine folder is complete and fits this machine."""
    try:
        engine = EngineFolder.open(folder)
        if engine is None:
            return False
        engine.check()
    except CheckpointError:
        return False
    return True


def folder_of(name: str) -> Path:
    """Folder of an engine; its name changes with the engine's inputs: checkpoints, settings, code."""
    return FOLDER / f"{name}-{engine_digest(target_of(name), speculation_of(name), dataclasses.asdict(CONFIG))}"
