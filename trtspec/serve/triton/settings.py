"""Writing and reading model.yaml, the settings of a Triton model that holds an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError, DependencyError
from trtspec.interop.yaml_text import to_yaml

FILE = "model.yaml"
CANCELLATION_CHECK_MS = 100


@dataclass(frozen=True)
class Settings:
    """The settings of a model. llm: arguments of trtspec.LLM, "model" included. cancellation_check_period: seconds."""

    llm: Mapping[str, Any]
    cancellation_check_period: float = CANCELLATION_CHECK_MS / 1000

    def text(self) -> str:
        """The settings as YAML, with the field names of TensorRT-LLM's file of this name."""
        period = {"cancellation_check_period_ms": round(self.cancellation_check_period * 1000)}
        return to_yaml({**self.llm, "triton_config": period})

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Settings in the folder of a model's version.

        Raises ConfigError naming file and field, DependencyError without PyYAML.
        """
        file = folder / FILE
        data = _mapping(file)
        triton = data.pop("triton_config", None) or {}
        if not isinstance(triton, dict) or set(triton) - {"cancellation_check_period_ms"}:
            raise ConfigError(f"{file}: triton_config = {triton!r}; it may hold cancellation_check_period_ms alone")
        period = triton.get("cancellation_check_period_ms", CANCELLATION_CHECK_MS)
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            raise ConfigError(f"{file}: cancellation_check_period_ms = {period!r} must be an integer >= 1")
        if not isinstance(data.get("model"), str):
            raise ConfigError(f"{file}: model = {data.get('model')!r}; give the folder of a checkpoint or an engine")
        return cls(data, period / 1000)


def _mapping(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise DependencyError("reading model.yaml needs PyYAML: pip install 'trtspec[serve]'") from error
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); write the repository again with trtspec triton-repo"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{file} holds a {type(data).__name__}, not a mapping; write it again with trtspec triton-repo"
        )
    return data
