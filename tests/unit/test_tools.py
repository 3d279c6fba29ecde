"""Tool calls in the notations of the common chat templates are found in whatever pieces the text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.serve.http.protocol import FunctionName, NamedTool, Tool
from trtspec.serve.http.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    CallParser,
    Notation,
    demanded_schema,
    notation_of,
    read_demanded,
)

WEATHER = {"city": "Besançon", "days": [1, 2]}
CASES: list[tuple[Notation, str, str, list[tuple[str, Any]]]] = [
    (HERMES, "Just text, 3 < 4.", "Just text, 3 < 4.", []),
    (
        HERMES,
        "Let me see.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Besançon", "days": [1, 2]}}\n</tool_call>',
        "Let me see.\n",
        [("weather", WEATHER)],
    ),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>',
        "",
        [("a", {}), ("b", {"x": 1})],
    ),
    (HERMES, "<tool_call>{nonsense</tool_call>", "<tool_call>{nonsense</tool_call>", []),
    (HERMES, "a < b, <tool", "a < b, <tool", []),
    (HERMES, "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),  # deeper than JSON is read
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Besançon", "days": [1, 2]}}]',
        "",
        [("weather", WEATHER)],
    ),
    (MISTRAL, 'ok [TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b{"y": 2}', "ok ", [("a", {"x": 1}), ("b", {"y": 2})]),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Besançon", "days": [1, 2]}}', "", [("weather", WEATHER)]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
        "",
        [("a", {}), ("b", {"x": 1})],
    ),
    (LLAMA3, 'The call {"name": "a"} is none.', 'The call {"name": "a"} is none.', []),
    (LLAMA3, '{"no": "call"}', '{"no": "call"}', []),
    (LLAMA3, "<|pyth", "<|pyth", []),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    case: tuple[Notation, str, str, list[tuple[str, Any]]], data: st.DataObject
) -> None:
    notation, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, shown = CallParser(notation), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += parser.push(text[start:end])
        assert content.startswith(shown)
    rest, found = parser.finish()
    assert shown + rest == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize(
    ("template", "notation"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("<|python_tag|>", LLAMA3),
        ('{"name": function name, "parameters": dictionary}', LLAMA3),
        ("nothing", HERMES),
    ],
)
def test_the_template_tells_the_notation(template: str, notation: Notation) -> None:
    assert notation_of(template) is notation


TOOLS = [
    Tool.model_validate({"function": {"name": "a", "parameters": {"type": "object", "required": ["x"]}}}),
    Tool.model_validate({"function": {"name": "b"}}),
]


def test_demanded_calls_are_a_list_of_those_there_are() -> None:
    schema = demanded_schema(TOOLS, "required", parallel=True)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert (schema["type"], schema["minItems"], names) == ("array", 1, ["a", "b"])
    assert "maxItems" not in schema
    assert demanded_schema(TOOLS, "required", parallel=False)["maxItems"] == 1
    named = demanded_schema(TOOLS, NamedTool(function=FunctionName(name="a")), parallel=True)
    assert named["items"]["properties"]["name"]["const"] == "a"
    assert named["items"]["properties"]["arguments"]["required"] == ["x"]
    assert named["maxItems"] == 1


def test_demanded_calls_that_never_end_are_none() -> None:
    assert read_demanded('[{"name": "a", "arguments": ' + "[" * 100_000) == []


@given(st.integers(0, 200))
def test_of_a_text_that_was_cut_short_the_whole_calls_count(length: int) -> None:
    calls = [{"name": "a", "arguments": {"x": i}} for i in range(4)]
    text = json.dumps(calls)[:length]
    found = read_demanded(text)
    assert [json.loads(call.arguments) for call in found] == [{"x": i} for i in range(text.count("}}"))]
