"""Digest of what a compiled engine is made of. A changed digest tells that a kept engine has to be built again.

An engine folder refuses a machine that it cannot run on. It cannot know that a checkpoint was trained again since, or
that the code now compiles something else.
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
"""Number of hex digits of a digest."""

PACKAGE = Path(__file__).resolve().parents[1]
# Sources that decide how an engine is compiled and packed. A change of other sources of the package keeps the digest.
_FOLDERS = ("backends", "config", "gguf", "methods", "models", "ops", "text", "verify")
_FILES = (
    "carry.py",
    "core.py",
    "modes.py",
    "protocols.py",
    "sampling_params.py",
    "kv/groups.py",
    "interop/reading.py",
    "interop/decoding_configs.py",
    "interop/decoding_fields.py",
)
_RUNS = ("wiring.py", "gpu_plan.py")  # files of build/ that run an engine; all others there make one
_KERNEL_SOURCES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


def engine_digest(checkpoint: Path, speculation: Mapping[str, Any] | None, options: Any) -> str:
    """Digest of all that decides what build_engine makes: two engines with one digest are the same.

    checkpoint: a folder, like the draft's that `speculation` may name. options: all further settings, as JSON.
    """
    folders = [checkpoint]
    if speculation is not None and "model" in speculation:
        folders.append(Path(speculation["model"]))
    settings = [speculation, options, machine("aoti"), load_plugins()]
    return digest(settings, folders, [*build_code(), *kernel_code()])


def digest(settings: Any, folders: Iterable[Path] = (), code: Iterable[Path] = ()) -> str:
    """Digest of settings, folders and code: DIGITS hex digits.

    settings: as JSON. folders: names, sizes and times of the last change of their files; contents may be gigabytes.
    code: names and contents of these files.
    """
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
    """The sources in all installed kernel packages, whether or not they load.

    Graphs call these kernels, and weights are packed for them.
    """
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    for package in sorted({point.module.split(".")[0] for point in points}):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(file for file in Path(folder).rglob("*") if file.suffix in _KERNEL_SOURCES)
