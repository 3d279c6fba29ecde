"""Write settings as YAML text that every YAML 1.1 and 1.2 reader reads back as the same values. It reads no YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trtspec.errors import ConfigError

# Plain scalars that YAML 1.1 does not read as strings; such keys are quoted.
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(value: Mapping[Any, Any]) -> str:
    """Return blocks of `key: value` lines with two spaces per level, and a line end.

    Values are None, bool, int, float, str, lists or tuples (written in one line) and mappings of these. Keys are str or
    int. String values are always quoted. Raises ConfigError for anything else.
    """
    return "\n".join(_block(value, "")) + "\n"


def _block(value: Mapping[Any, Any], indent: str) -> list[str]:
    if not value:
        return [f"{indent}{{}}"]
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            lines += [f"{indent}{_key(key)}:", *_block(item, indent + "  ")]
        else:
            lines.append(f"{indent}{_key(key)}: {_inline(item)}")
    return lines


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before int, as True is an int
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _quoted(value)
    raise ConfigError(f"{value!r} is a {type(value).__name__}, which cannot be written as YAML; use text or a number")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(float(value))
    # YAML 1.1 reads 1e-07 as text: a number with an exponent needs a point
    return text if "." in text else text.replace("e", ".0e")


def _key(key: Any) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    if not isinstance(key, str):
        raise ConfigError(f"{key!r} is a {type(key).__name__}, which is no YAML key here; use text or a whole number")
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", key) is not None and key.lower() not in _RESERVED
    return key if plain else _quoted(key)


def _quoted(text: str) -> str:
    """The text in double quotes, on one line, with an escape for what is not printable."""
    return '"' + "".join(map(_character, text)) + '"'


def _character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    if c.isprintable():
        return c
    point = ord(c)
    return f"\\x{point:02x}" if point <= 0xFF else f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"
