"""The strict, frozen pydantic base of all that users write. Its errors name the field, the value and the remedy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from trtspec.errors import ConfigError, UnsupportedError

JsonKey = Annotated[int, Field(strict=False)]  # JSON's keys are strings: "4" counts as 4


class StrictConfig(BaseModel):
    """A frozen config. Unknown fields and wrong types are errors, and every error is a ConfigError.

    A field's description says in a few words what a right value is. The error message has it as the remedy.
    """

    # strict: True is not 1, and "3" is not 3. protected_namespaces: some fields are named model*.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    if not TYPE_CHECKING:  # type checkers see the fields as keyword arguments

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise ConfigError(_message(type(self), error)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ConfigError(_message(cls, error)) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise ConfigError(_message(cls, error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"{type(self).__name__}.{name}={value!r}: configs are frozen; build a new one instead")


def refuse_unbuilt(where: str, asked: Mapping[str, Any], allowed: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raise UnsupportedError for the first field whose value in `asked` is not allowed.

    allowed: field -> (allowed values, remedy for others).
    """
    for field, (values, remedy) in allowed.items():
        if asked[field] not in values:
            raise UnsupportedError(f"{where}{field}={asked[field]!r} is not built yet; {remedy}")


def list_to_tuple(value: Any) -> Any:
    """Turn lists into tuples, also inside lists: JSON has no tuples."""
    return tuple(list_to_tuple(item) for item in value) if isinstance(value, list) else value


def text_of_path(value: Any) -> Any:
    """Turn a path object into text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def one_of(field: str, names: tuple[str, ...]) -> Callable[[str], str]:
    """Return a validator that raises ConfigError unless the value is one of `names`."""

    def check(value: str) -> str:
        if value not in names:
            raise ConfigError(f"{field}={value!r} is unknown; use one of {', '.join(names)}")
        return value

    return check


def _message(cls: type[BaseModel], error: ValidationError) -> str:
    return "; ".join(_one_message(cls, detail) for detail in error.errors(include_url=False))


def _one_message(cls: type[BaseModel], detail: Any) -> str:
    raised = detail.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # from a rule between fields: its message is complete
        return str(raised)
    path, value = detail["loc"], detail["input"]
    if not path:
        return f"{cls.__name__}: {detail['msg']}"
    name = ".".join(str(part) for part in path)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(cls.model_fields)}"
        return f"{cls.__name__}.{name}={value!r}: unknown field; {hint}"
    if detail["type"] == "missing" and len(path) == 1:
        return f"{cls.__name__}.{name}=None: it is required; set it"
    field = cls.model_fields.get(str(path[0]))
    remedy = f" ({field.description})" if field is not None and field.description else ""
    return f"{cls.__name__}.{name}={value!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}{remedy}"
