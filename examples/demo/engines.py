"""The demo's compiled engines: built when they are missing or made from something else, kept in build/demo-engines."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console

import trtspec
from trtspec.config.engine import EngineConfig
from trtspec.config.engine_folder import EngineFolder
from trtspec.config.speculative import SpeculativeConfig
from trtspec.engine.build import build_engine
from trtspec.errors import CheckpointError

HERE = Path(__file__).parent
TARGET, DRAFT, EAGLE3 = HERE / "target", HERE / "draft", HERE / "eagle3"
K = 3
FOLDER = HERE.parents[1] / "build" / "demo-engines"

ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft": {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": K},
    "eagle3": {"method": "eagle3", "model": str(EAGLE3), "num_speculative_tokens": K},
}


def build_missing(console: Console) -> dict[str, Path]:
    """Name -> folder of every engine, all of them there and up to date."""
    digest = ingredients()
    folders = {name: FOLDER / f"{name}-{digest}" for name in ENGINES}
    missing = [name for name, folder in folders.items() if not usable(folder)]
    if missing:
        with (
            console.status(f"compiling engines: {', '.join(missing)} (once, about a minute)"),
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
        ):
            for done in as_completed([pool.submit(build, name, folders[name]) for name in missing]):
                console.print(f"compiled {done.result()}", style="dim", highlight=False)
    return folders


def build(name: str, folder: Path) -> Path:
    """Compile one engine; in a process of its own, as compilers keep two cores busy."""
    config = EngineConfig(max_batch_size=8)
    build_engine(TARGET, folder, SpeculativeConfig.from_any(ENGINES[name]), config, replace_existing=True)
    for outdated in set(FOLDER.glob(f"{name}-*")) - {folder}:
        shutil.rmtree(outdated)
    return folder


def usable(folder: Path) -> bool:
    """Whole, and for this machine."""
    try:
        engine = EngineFolder.open(folder)
        if engine is None:
            return False
        engine.check()
    except CheckpointError:
        return False
    return True


def ingredients() -> str:
    """A digest of what engines are made from: the checkpoints, and the code that compiles them."""
    digest = hashlib.sha256()
    sources = sorted(Path(trtspec.__file__).parent.rglob("*.py"))
    for file in (*sources, *sorted(f for folder in (TARGET, DRAFT, EAGLE3) for f in folder.iterdir())):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
