"""Export speculation as settings of other servers: `export_settings`, and the text that their command lines take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.interop.field_mapper import FieldWarning
from trtspec.interop.tensorrt_llm import to_tensorrt_llm
from trtspec.interop.vllm import to_vllm
from trtspec.interop.yaml_text import to_yaml

_Convert = Callable[[SpeculativeConfig, "DraftInfo | None"], tuple[dict[str, Any], list[FieldWarning]]]


def _yaml_file(settings: Mapping[str, Any]) -> str:
    """Text of FILE for `trtllm-serve MODEL --extra_llm_api_options FILE`."""
    return to_yaml({"speculative_config": settings})


def _json_object(settings: Mapping[str, Any]) -> str:
    """Text of FILE for `vllm serve MODEL --speculative-config "$(cat FILE)"`."""
    return json.dumps(settings) + "\n"


_SERVERS: dict[str, tuple[_Convert, Callable[[Mapping[str, Any]], str]]] = {
    "tensorrt-llm": (to_tensorrt_llm, _yaml_file),
    "vllm": (to_vllm, _json_object),
}
SERVERS = tuple(_SERVERS)


def export_settings(
    config: SpeculativeConfig, server: str, draft: DraftInfo | None = None
) -> tuple[dict[str, Any], list[FieldWarning]]:
    """Return (settings of `server`, a warning for each field of `config` that has no equal there).

    draft: what is known of the draft checkpoint. Without it, what only the checkpoint's config.json says is not carried
    over. Raises UnsupportedError for a method that the server does not have, and names the nearest. Raises ConfigError
    for an unknown server, and for a config that contradicts itself.
    """
    return _row(server)[0](config, draft)


def settings_text(settings: Mapping[str, Any], server: str) -> str:
    """The settings as text that the server reads: a YAML file, or a JSON object in one line."""
    return _row(server)[1](settings)


def _row(server: str) -> tuple[_Convert, Callable[[Mapping[str, Any]], str]]:
    try:
        return _SERVERS[server]
    except KeyError:
        raise ConfigError(f"server={server!r} is unknown; use one of {', '.join(SERVERS)}") from None
