"""Reader of a checkpoint's JSON files: typed access, and errors that name the role, the file and the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trtspec.errors import CheckpointError, UnsupportedError


class Reader:
    """Typed access to one JSON object. Every error names the role, the file, the field and the remedy."""

    def __init__(self, data: dict[str, Any], file: Path, role: str, prefix: str = ""):
        self.data, self.file, self.role, self.prefix = data, file, role, prefix

    def sub(self, key: str, data: dict[str, Any]) -> Reader:
        """Reader of `data`, the object at `key`; its errors name the field by its whole path."""
        return Reader(data, self.file, self.role, f"{self.prefix}{key}.")

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.role} model: {self.file}: field {self.prefix + key!r} {problem}")

    def unsupported(self, key: str, problem: str) -> UnsupportedError:
        value = short(self.data.get(key))
        return UnsupportedError(f"{self.role} model: {self.file}: field {self.prefix + key!r} = {value}: {problem}")

    def _value(self, key: str, default: Any, kind: str) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            named = self.data.get("architectures")
            which = f" (architectures: {short(named)})" if named else ""
            raise self.error(
                key, f"is missing{which}; add it ({kind}), or use a checkpoint of a supported architecture"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"= {short(value)} is not an integer; correct it in the file")
        return int(value)

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self.error(key, f"= {value} must be at least 1; correct it in the file")
        return value

    def optional_positive_int(self, key: str) -> int | None:
        return None if self.data.get(key) is None else self.positive_int(key)

    def number(self, key: str, default: float | None = None, minimum: float = -math.inf) -> float:
        """A finite number > `minimum`."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, f"= {short(value)} is not a number; correct it in the file")
        if value <= minimum:
            raise self.error(key, f"= {value} must be greater than {minimum:g}; correct it in the file")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.data.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"= {short(value)} is not true or false; correct it in the file")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"= {short(value)} is not a string; correct it in the file")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"= {short(value)} is not an object; correct it in the file")
        return value

    def architecture(self) -> str:
        names = self.data.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error("architectures", f'= {short(names)} names no model class; add e.g. ["LlamaForCausalLM"]')
        return names[0]


def short(value: Any) -> str:
    """The value as JSON, cut to at most 80 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(file: Path, role: str, required: bool) -> dict[str, Any]:
    """The object in `file`; {} if the file is missing and not `required`. Raises CheckpointError."""
    if not file.is_file():
        if not required:
            return {}
        raise CheckpointError(
            f"{role} model: {file} is missing; pass a Hugging Face checkpoint folder (config.json and *.safetensors)"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{role} model: {file} is not readable JSON ({error}); download the file again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{role} model: {file} holds a {type(data).__name__}, not an object; download it again")
    return data
