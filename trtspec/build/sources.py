"""What a compiled engine is made of, as a digest: whoever keeps engines sees by it that one has to be built again.

An engine folder refuses a machine that it cannot run on. That a checkpoint was trained again since, or that the code
now compiles something else, it cannot know.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trtspec.build.engine_folder import machine
from trtspec.ops import load_plugins
from trtspec.ops.dispatch import PLUGIN_GROUP

DIGITS = 12
"""Of a digest."""

PACKAGE = Path(__file__).resolve().parents[1]
# What decides how an engine is compiled and packed: changing anything else in the package keeps it.
_FOLDERS = ("backends", "config", "gguf", "methods", "models", "ops", "text", "verify")
_FILES = (
    "core.py",
    "modes.py",
    "protocols.py",
    "sampling_params.py",
    "kv/groups.py",
    "interop/reading.py",
    "interop/decoding_configs.py",
)
_RUNS = ("wiring.py", "gpu_plan.py")  # of build/: what runs an engine; all else there makes one
_KERNEL_SOURCES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


def engine_digest(checkpoint: Path, speculation: Mapping[str, Any] | None, options: Any) -> str:
    """Of all that decides what build_engine makes: two engines of one digest are the same.

    checkpoint: a folder, as the draft's that `speculation` may name. options: whatever else is asked for, as JSON.
    """
    folders = [checkpoint]
    if speculation is not None and "model" in speculation:
        folders.append(Path(speculation["model"]))
    settings = [speculation, options, machine("aoti"), load_plugins()]
    return digest(settings, folders, [*build_code(), *kernel_code()])


def digest(settings: Any, folders: Iterable[Path] = (), code: Iterable[Path] = ()) -> str:
    """DIGITS hex digits of the settings (JSON), of the files under `folders` (names, sizes, times of their last change:
    they may be gigabytes) and of the files `code` (names, contents)."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            facts = file.stat()
            found.update(repr((file.relative_to(folder).as_posix(), facts.st_size, facts.st_mtime_ns)).encode())
    for file in code:
        found.update(repr((file.name, file.read_bytes())).encode())
    return found.hexdigest()[:DIGITS]


def build_code() -> Iterator[Path]:
    """The sources of this package that decide what is compiled and packed."""
    for folder in _FOLDERS:
        yield from sorted(file for file in (PACKAGE / folder).rglob("*.py") if file.name != "train.py")
    yield from sorted(file for file in (PACKAGE / "build").glob("*.py") if file.name not in _RUNS)
    yield from (PACKAGE / file for file in _FILES)


def kernel_code() -> Iterator[Path]:
    """The sources in all installed kernel packages, whether or not they load: graphs call them and weights are packed
    for them."""
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    for package in sorted({point.module.split(".")[0] for point in points}):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(file for file in Path(folder).rglob("*") if file.suffix in _KERNEL_SOURCES)
