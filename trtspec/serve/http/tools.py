"""Tool calls: from a model's text to OpenAI's `tool_calls`, in the notations of the common chat templates.

| notation | a call |
|---|---|
| hermes (Hermes, Qwen) | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer ones `[TOOL_CALLS]name[ARGS]{...}` |
| llama3 | the whole text is `{"name": ..., "parameters": {...}}`, more after `;`, `<|python_tag|>` before it or not |

If a call is demanded (tool_choice "required" or a name), a JSON schema constrains the text instead, whatever the
model's notation. `demanded_schema` makes this schema.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec.serve.http.protocol import NamedTool, Tool

_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """One tool call. arguments: JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])

    def to_dict(self, index: int | None = None) -> dict[str, Any]:
        """The call in OpenAI's form. index: its index in a stream, None = without."""
        place = {} if index is None else {"index": index}
        return {
            **place,
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class Notation:
    """A notation in which a template's models write tool calls.

    markers: texts that begin a call. only_at_start: a call can only be at the start of the text. read: parses a text
    from its marker on; raises ValueError for a text that is not a call.
    """

    name: str
    markers: tuple[str, ...]
    only_at_start: bool
    read: Callable[[str], list[Call]]


def _call(value: Any) -> Call:
    """Call from {"name": ..., "arguments" or "parameters": {...}}. ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _read_hermes(text: str) -> list[Call]:
    parts = text.split("<tool_call>")[1:]
    return [_call(json.loads(part.split("</tool_call>")[0])) for part in parts]


def _read_mistral(text: str) -> list[Call]:
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith("["):
            listed, _ = _decoder.raw_decode(part.lstrip())
            calls += map(_call, listed)
        else:
            brace = part.index("{")
            arguments, _ = _decoder.raw_decode(part[brace:])
            calls.append(_call({"name": part[:brace].replace("[ARGS]", "").strip(), "arguments": arguments}))
    return calls


def _read_llama3(text: str) -> list[Call]:
    rest, calls = text.removeprefix("<|python_tag|>").strip(), []
    while rest:
        value, end = _decoder.raw_decode(rest)
        if isinstance(value, dict) and not {"parameters", "arguments"} & value.keys():
            raise ValueError("no call")  # else any JSON answer with a name would be a call
        calls.append(_call(value))
        rest = rest[end:].lstrip("; \n")
    return calls


HERMES = Notation("hermes", ("<tool_call>",), False, _read_hermes)
MISTRAL = Notation("mistral", ("[TOOL_CALLS]",), False, _read_mistral)
LLAMA3 = Notation("llama3", ("<|python_tag|>", "{"), True, _read_llama3)
NOTATIONS = {one.name: one for one in (HERMES, MISTRAL, LLAMA3)}


def notation_of(template: str) -> Notation:
    """Notation of a chat template, by the markers in its source; Hermes', the most common, if there are none."""
    for one, words in (
        (HERMES, ("<tool_call>",)),
        (MISTRAL, ("[TOOL_CALLS]",)),
        (LLAMA3, ("python_tag", '"parameters"')),
    ):
        if any(word in template for word in words):
            return one
    return HERMES


class CallParser:
    """A parser that divides a text, as it comes, into content and calls.

    It returns content as it comes. From the first marker on it holds the text, and parses it when the text ends. Text
    that begins like a call and is none is content. Special tokens are never content.

    names: names of the tools. JSON without a marker is a call only if it names one of these.
    """

    def __init__(self, notation: Notation, names: Collection[str]) -> None:
        self._notation = notation
        self._names = frozenset(names)
        self._held = ""  # text that may become a marker, or begins with one
        self._specials: set[str] = set()  # special tokens so far
        self._in_call = False
        self._started = False  # there was non-blank text

    def push(self, text: str, specials: Iterable[str] = ()) -> str:
        """Add text; return the part that is certainly content.

        specials: special tokens that the text shows, or is about to show.
        """
        self._specials.update(specials)
        self._held += text
        for special in self._specials.difference(self._notation.markers):
            self._held = self._held.replace(special, "")
        if self._in_call:
            return ""
        if self._notation.only_at_start:
            return self._push_start()
        places = [place for marker in self._notation.markers if (place := self._held.find(marker)) >= 0]
        if places:
            self._in_call = True
            return self._cut(min(places))
        return self._cut(len(self._held) - self._open_end())

    def finish(self) -> tuple[str, list[Call]]:
        """End the text: return the rest of the content, and the calls."""
        held, self._held = self._held, ""
        if not self._in_call:
            return held, []
        try:
            calls = self._notation.read(held)
            if held.lstrip().startswith("{") and not self._names.issuperset(call.name for call in calls):
                raise ValueError("an answer in JSON")
            return "", calls
        except (ValueError, RecursionError):  # includes JSON's errors
            for marker in self._specials.intersection(self._notation.markers):
                held = held.replace(marker, "")
            return held, []

    def _push_start(self) -> str:
        text = self._held.lstrip()
        if self._started or not text:
            return self._cut(len(self._held)) if self._started else ""
        if text.startswith(self._notation.markers):
            self._in_call = True
            return ""
        if any(marker.startswith(text) for marker in self._notation.markers):
            return ""
        self._started = True
        return self._cut(len(self._held))

    def _open_end(self) -> int:
        """Number of characters at the end that may begin a marker."""
        longest = max(map(len, self._notation.markers)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(marker.startswith(self._held[-count:]) for marker in self._notation.markers):
                return count
        return 0

    def _cut(self, count: int) -> str:
        content, self._held = self._held[:count], self._held[count:]
        return content


def demanded_schema(tools: Sequence[Tool], choice: str | NamedTool, parallel: bool) -> dict[str, Any]:
    """JSON schema of a text that must be a list of calls {"name", "arguments"}.

    The list has one call if `parallel` is False, or if `choice` names a function.
    """
    wanted = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        wanted = [function for function in wanted if function.name == choice.function.name]
    one, definitions = [], {}
    for i, function in enumerate(wanted):
        arguments = function.parameters or {"type": "object"}
        moved = _rebased(arguments, f"#/$defs/{i}")
        if moved != arguments:  # its references count from the root of its own schema
            definitions[str(i)], arguments = moved, {"$ref": f"#/$defs/{i}"}
        one.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    single = not parallel or isinstance(choice, NamedTool)
    return {
        **({"$defs": definitions} if definitions else {}),
        "type": "array",
        "items": one[0] if len(one) == 1 else {"anyOf": one},
        "minItems": 1,
        **({"maxItems": 1} if single else {}),
    }


def _rebased(schema: Any, place: str) -> Any:
    """The schema with references to its own root changed to lead to `place`."""
    if isinstance(schema, list):
        return [_rebased(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    rebased: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("const", "enum", "default", "examples"):  # these are values, not schemas
            rebased[key] = value
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            rebased[key] = {name: _rebased(one, place) for name, one in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            rebased[key] = place + value[1:]
        else:
            rebased[key] = _rebased(value, place)
    return rebased


def read_demanded(text: str) -> list[Call]:
    """Calls of a text under `demanded_schema`; only the complete calls if the text was cut short."""
    rest, calls = text.lstrip().removeprefix("["), []
    while rest := rest.lstrip(" ,\n\t"):
        try:
            value, end = _decoder.raw_decode(rest)
            calls.append(_call(value))
        except (ValueError, RecursionError):
            break
        rest = rest[end:]
    return calls
