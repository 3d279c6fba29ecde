"""Writing a Triton model repository for a checkpoint or an engine folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.build.engine_folder import EngineFolder
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError
from trtspec.hub.folders import lasting_path
from trtspec.interop.reading import read_speculative_config
from trtspec.serve.triton.configs import LAYOUTS, ModelSpec, config_text
from trtspec.serve.triton.settings import FILE, Settings
from trtspec.text import Tokenizer

_MODEL_PY = '''"""What Triton's python backend loads; the code is trtspec's."""

from {module} import {name} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_MODELS = ("model", "speculative_model", "speculative_model_dir")
"""Fields that name models, in a speculative_config of our form or of TensorRT-LLM's."""
_NO_FOLDERS = ("ngram", "[ngram]", "suffix", "grammar")
"""Values of `model` that are not folders but methods, in vLLM's spelling."""
_TOKENIZER_ONLY = ("preprocessing", "postprocessing")


def write_repository(
    output: str | Path,
    model: str | Path,
    speculative_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    *,
    layout: str = "llmapi",
    streaming: bool = True,
    **engine_options: Any,
) -> list[Path]:
    """Write a model repository, whole or not at all; return the folders of its models.

    model, speculative_config, tokenizer, engine_options: as trtspec.LLM takes them. Paths become absolute, and names on
    the Hub become the paths of their snapshots. layout: "llmapi" or "classic". streaming: False = each request is
    answered once, so that calls without streams work too.
    Raises ConfigError for settings that contradict each other, a model without tokenizer, or an output folder that is
    in use. Raises CheckpointError for a model or tokenizer that cannot be read.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout = {layout!r}; use one of {', '.join(LAYOUTS)}")
    target = Path(output).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; give an empty or a new folder")
    revision = engine_options.pop("revision", None)
    model = _folder(model, revision)
    built = EngineFolder.open(model)
    if built is None:
        EngineConfig(**engine_options)
    else:
        built.check()
        built.engine_config(engine_options)
    text_folder = _folder(model if tokenizer is None else tokenizer)
    if Tokenizer.from_folder(text_folder) is None:
        raise ConfigError(
            f"{text_folder} has no tokenizer.json, which text needs; give a folder that has with --tokenizer"
        )
    llm: dict[str, Any] = {"model": model, **engine_options}
    if speculative_config is not None:
        read_speculative_config(speculative_config)
        draft_revision = speculative_config.get("revision")
        llm["speculative_config"] = {
            key: _folder(value, draft_revision) if key in _MODELS and value not in (None, *_NO_FOLDERS) else value
            for key, value in speculative_config.items()
            if key != "revision"
        }
        if (states := speculative_config.get("output_directory")) is not None:
            llm["speculative_config"]["output_directory"] = str(Path(states).absolute())
    if tokenizer is not None:
        llm["tokenizer"] = text_folder
    half = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        for spec in LAYOUTS[layout]:
            _write_model(half / spec.name, spec, Settings(llm), text_folder, streaming)
        os.replace(half, target)  # replaces an empty folder
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return [target / spec.name for spec in LAYOUTS[layout]]


def _write_model(folder: Path, spec: ModelSpec, settings: Settings, tokenizer: str, streaming: bool) -> None:
    version = folder / "1"  # empty for an ensemble, but required
    version.mkdir(parents=True)
    parameters = {"tokenizer_dir": tokenizer} if spec.name in _TOKENIZER_ONLY else {}
    _write(folder / "config.pbtxt", config_text(spec, streaming, parameters))
    if spec.python_class:
        module, _, name = spec.python_class.rpartition(".")
        _write(version / "model.py", _MODEL_PY.format(module=module, name=name))
    if spec.name == "tensorrt_llm":
        _write(version / FILE, settings.text())


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _folder(path: str | Path, revision: str | None = None) -> str:
    """Absolute path, as the server runs elsewhere; for a name on the Hub, that of its snapshot or GGUF file."""
    found = Path(path)
    if revision is not None or not found.exists():
        found = lasting_path(path, revision=revision)
    return str(found.absolute())
