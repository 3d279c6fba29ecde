"""Any value that may be given as speculative_config -> SpeculativeConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.interop.decoding_configs import DecodingBaseConfig, decoding_config_from_dict


def read_speculative_config(value: Any) -> SpeculativeConfig | None:
    """Return the SpeculativeConfig that `value` describes; None stays None. Raises ConfigError or UnsupportedError.

    value: None, a SpeculativeConfig, a TensorRT-LLM-style config, or a dict of either config. A dict of the latter has
    a "decoding_type".
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, DecodingBaseConfig):
        return value.to_speculative_config()
    if isinstance(value, Mapping):
        fields = dict(value)
        if "decoding_type" in fields:
            return decoding_config_from_dict(fields).to_speculative_config()
        return SpeculativeConfig(**fields)
    raise ConfigError(
        f"speculative_config={value!r} is a {type(value).__name__}; use None, a dict, a SpeculativeConfig or a "
        "decoding config such as NGramDecodingConfig"
    )
