"""The config.json of a compiled engine: what it was built from and for, what is in it, and whether it can run here.

An engine folder contains:

    config.json            this file; `checkpoint_quantization`: which checkpoints were quantised already, and how
    tokenizer.json, ...    as in the checkpoint
    target/, draft/        config.json of the checkpoint; graphs and weights as the backend's executable reads them
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from trtspec.backends.table import BACKENDS, COMPILERS
from trtspec.config.engine import EngineConfig, at_least
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import settle

FORMAT = 6
"""Version of the folder's format. It changes when older engines can no longer be read."""

MARK = "trtspec_engine"
"""Key in config.json that marks an engine."""
# Fields of EngineConfig that the graphs do not depend on. All others are fixed when an engine is built.
_RUNTIME = {
    "kv_cache_memory", "num_kv_blocks", "enable_prefix_caching", "seed", "generation_config",
    "force_num_accepted_tokens", "disable_overlap_scheduler", "enable_cuda_graph", "debug",
    "disable_log_stats", "device",
}  # fmt: skip
_AT_MOST = {"max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"}


@dataclass(frozen=True)
class EngineFolder:
    """An engine folder whose config.json has been read. Its errors are CheckpointErrors that say what to rebuild."""

    path: Path
    data: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EngineFolder | None:
        """Read the engine at `path`; None if `path` is something else, such as a checkpoint or nothing at all.

        An engine has a folder of its target. The config.json of any other folder is left to the reader of that folder.
        """
        folder = Path(path)
        data = _marked(folder) if (folder / "target").is_dir() else None
        if data is None:
            return None
        if data[MARK] != FORMAT:
            raise CheckpointError(
                f"engine {folder} has format {data[MARK]!r}, this version of trtspec reads {FORMAT}; "
                "rebuild it with trtspec build"
            )
        parts = ("machine", "build_config", "executables", "files")
        missing = [key for key in parts if not isinstance(data.get(key), dict)]
        if missing:
            raise CheckpointError(f"engine {folder}: config.json lacks {', '.join(missing)}; rebuild it")
        backend = data["build_config"].get("backend")
        if backend not in COMPILERS:
            raise CheckpointError(
                f"engine {folder} is of backend {backend!r}, which this version of trtspec does not run; rebuild it"
            )
        features = data["machine"].get("cpu_features", [])
        whole = isinstance(features, list) and all(isinstance(name, str) for name in features)
        fields_of = [*data["files"].values(), *data["executables"].values()]
        whole = whole and all(isinstance(value, dict) for value in fields_of)
        whole = whole and machine(backend).keys() <= data["machine"].keys()
        if not whole or not all({"size", "sha256"} <= facts.keys() for facts in data["files"].values()):
            raise CheckpointError(f"engine {folder}: config.json is damaged; copy it again or rebuild the engine")
        return cls(folder, data)

    @staticmethod
    def has_mark(path: str | os.PathLike[str]) -> bool:
        """Whether `path` is an engine, in whatever format and state."""
        return _marked(Path(path)) is not None

    @property
    def backend(self) -> str:
        """Name, in backends.table, of the backend whose graphs the folder holds."""
        return str(self.data["build_config"]["backend"])

    def check(self) -> None:
        """Check that every file is there in its size, and that this machine can run the graphs."""
        for name, facts in self.data["files"].items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"engine {self.path}: {name} is missing; copy it again or rebuild the engine")
            if file.stat().st_size != facts["size"]:
                raise CheckpointError(
                    f"engine {self.path}: {name} has {file.stat().st_size} bytes, not {facts['size']}; "
                    "copy it again or rebuild the engine"
                )
        built, here = self.data["machine"], machine(self.backend)
        for what in here.keys() - {"cpu_features"}:
            if built.get(what) != here[what]:
                raise CheckpointError(
                    f"engine {self.path} was built for {what} {built.get(what)}, this is {here[what]}; "
                    "rebuild it here with trtspec build"
                )
        lacking = sorted(set(built.get("cpu_features", ())) - set(here.get("cpu_features", ())))
        if lacking:
            raise CheckpointError(
                f"engine {self.path} was built for another CPU: this one lacks {' '.join(lacking)}; "
                "rebuild it here with trtspec build"
            )

    def verify(self, report: Callable[[str], None] = lambda name: None) -> None:
        """Check as `check` does, and also that every file has the contents it was built with (SHA-256)."""
        self.check()
        for name, facts in self.data["files"].items():
            report(name)
            if sha256(self.path / name) != facts["sha256"]:
                raise CheckpointError(
                    f"engine {self.path}: {name} is not what was built (its SHA-256 differs); "
                    "copy it again or rebuild the engine"
                )

    def engine_config(self, options: Mapping[str, Any]) -> EngineConfig:
        """EngineConfig that the engine was built with, changed by `options` where it may differ at run time.

        options: fields of EngineConfig. ConfigError names a field that asks for another engine.
        """
        built = dict(self.data["build_config"])
        for name, value in options.items():
            if name in _RUNTIME:
                built[name] = value
            elif name in _AT_MOST and value is not None:
                at_least(name, value, 1)
                if built[name] is not None and value > built[name]:
                    raise ConfigError(
                        f"{name} = {value}: this engine was built with {built[name]}; rebuild it with --{name} {value}"
                    )
                built[name] = value
            elif value not in (built[name], "auto", None):
                raise ConfigError(
                    f"{name} = {value!r}: this engine was built with {built[name]!r}; rebuild it, or leave {name} unset"
                )
        return EngineConfig(**built)

    def speculating(self, config: SpeculativeConfig) -> EngineFolder:
        """The same graphs with another config of the same speculation.

        The config may differ in what graphs do not depend on.
        """
        return replace(self, data={**self.data, "speculative_config": config})

    def speculative_config(self) -> SpeculativeConfig | None:
        """The speculation that the engine was built for. The draft checkpoint is the engine's own."""
        config = read_speculative_config(self.data.get("speculative_config"))
        if config is None:
            return None
        row, model = settle(config)
        if (self.path / "draft" / "config.json").is_file():
            model = str(self.path / "draft")
        elif model is not None and (row is None or row.checkpoint is not None):  # layers that came with the target
            model = str(self.path / "target")
        revision = config.revision if model == config.model else None  # a folder of the engine's has none
        return config.model_copy(
            update={"method": None if row is None else row.name, "model": model, "revision": revision}
        )


def graph_options(config: EngineConfig) -> dict[str, Any]:
    """Fields of the config that graphs depend on, without limits."""
    others = _RUNTIME | _AT_MOST | {"backend"}
    return {name: value for name, value in asdict(config).items() if name not in others}


def engine_json(
    config: EngineConfig,
    speculative: Mapping[str, Any] | None,
    pretrained: Mapping[str, Any],
    executables: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """config.json of a new engine. `files` is added once all files are there (see `file_facts`)."""
    runtime = {field.name: field.default for field in fields(EngineConfig) if field.name in _RUNTIME}
    return {
        MARK: FORMAT,
        "machine": machine(config.backend),
        "pretrained_config": pretrained,
        "build_config": {name: value for name, value in asdict(config).items() if name not in runtime},
        "speculative_config": speculative,
        "executables": executables,
    }


def _marked(folder: Path) -> dict[str, Any] | None:
    """config.json of the engine in `folder`, None if there is no engine."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and MARK in data else None


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file under `folder`, by relative path."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / "config.json")
    return {str(file.relative_to(folder)): {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}


def sha256(file: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def machine(backend: str) -> dict[str, Any]:
    """Facts of this machine that compiled graphs depend on.

    Graphs for a CPU use every instruction of the CPU they were built on. Graphs for a GPU run on one kind of GPU.
    """
    trtspec, code_for = {"trtspec": importlib.metadata.version("trtspec")}, BACKENDS[backend].code_for
    if code_for == "gpu":
        gpu = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"
        return {**trtspec, "torch": str(torch.__version__), "gpu": gpu}
    if code_for != "cpu":
        return trtspec
    return {
        **trtspec,
        "torch": str(torch.__version__),
        "architecture": platform.machine(),
        "cpu_features": _cpu_features(),
    }


def _cpu_features() -> list[str]:
    """Vector and bit-manipulation features that the operating system reports; empty if it reports none (no Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            kinds = ("avx", "amx", "fma", "bmi", "f16c", "sse4", "abm", "adx", "gfni", "vaes", "asimd", "sve", "bf16")
            return sorted({flag for flag in value.split() if flag.startswith(kinds)})
    return []
