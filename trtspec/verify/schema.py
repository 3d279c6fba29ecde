"""JSON schemas whose keywords a grammar cannot enforce: the compiler would drop these keywords without an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NEVER = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
)
_NOTES = frozenset(
    (
        "$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples",
        "deprecated", "readOnly", "writeOnly", "discriminator",
    )
)  # fmt: skip
"""Keywords that say nothing about a value."""


def unenforced(schema: object) -> str | None:
    """The first keyword of a schema, or combination of keywords, that xgrammar ignores; None if there is none.

    `format` counts as a note, as the standard has it, and `oneOf` as `anyOf`.
    """
    return next((found for one in _objects(schema) if (found := _ignored(one))), None)


def _ignored(schema: Mapping[str, Any]) -> str | None:
    for keyword in _NEVER:
        if keyword in schema:
            return keyword
    if schema.get("uniqueItems"):
        return "uniqueItems"
    if "multipleOf" in schema and schema.get("type") != "integer":
        return "multipleOf of a number"
    lengths = [one for one in ("minLength", "maxLength") if one in schema]
    for keyword in ("pattern", "format"):
        if lengths and keyword in schema:
            return f"{keyword} with {lengths[0]}"
    if len(schema.get("allOf") or ()) > 1:
        return "allOf with several schemas"
    for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
        others = schema.keys() - _NOTES - {keyword}
        if keyword in schema and others:
            return f"{keyword} with {min(others)}"
    return None


def _objects(schema: object) -> Iterator[Mapping[str, Any]]:
    """A schema, and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(named := schema.get(keyword), Mapping):
            for one in named.values():
                yield from _objects(one)
    for keyword in ("items", "prefixItems", "anyOf", "oneOf", "allOf"):
        listed = schema.get(keyword)
        for one in listed if isinstance(listed, list) else [listed]:
            yield from _objects(one)
    for keyword in ("additionalProperties", "propertyNames", "additionalItems", "unevaluatedProperties"):
        yield from _objects(schema.get(keyword))
