"""Tool calls in the notations of the common chat templates are found in whatever pieces the text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.serve.http.protocol import FunctionName, NamedTool, Tool
from trtspec.serve.http.replies import json_of
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
    (LLAMA3, '{"name": "weather"}', '{"name": "weather"}', []),  # an answer in JSON, which somebody may have asked for
    (LLAMA3, '{"name": "Ann", "parameters": {"age": 3}}', '{"name": "Ann", "parameters": {"age": 3}}', []),
    (LLAMA3, '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", {})]),
    (LLAMA3, "<|pyth", "<|pyth", []),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    case: tuple[Notation, str, str, list[tuple[str, Any]]], data: st.DataObject
) -> None:
    notation, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, shown = CallParser(notation, ("weather", "a", "b")), ""
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


def test_half_a_character_in_a_call_is_sent() -> None:
    """JSON may escape half of a surrogate pair, and UTF-8 cannot have it."""
    parser = CallParser(HERMES, ["a"])
    parser.push('<tool_call>{"name": "a", "arguments": {"x": "\\ud83d"}}</tool_call>')
    [call] = parser.finish()[1]
    assert json.loads(json_of(call.to_dict()))["function"]["arguments"] == '{"x": "?"}'


NESTED = """{
    "type": "object", "required": ["to", "next"], "additionalProperties": false,
    "properties": {
        "to": {"$ref": "#/$defs/Address"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "$ref": {"enum": [{"$ref": "#/none"}]}, "default": {"$ref": "#/$defs/Address"}
    },
    "$defs": {"Address": {"type": "object", "required": ["city"], "additionalProperties": false,
                          "properties": {"city": {"type": "string"}}}}
}"""
"""A schema as pydantic makes it of a model in a model, with a field of its own kind."""


def test_references_of_a_schema_hold_in_demanded_calls() -> None:
    """A grammar of the whole takes what the function's own schema takes, and nothing else."""
    parameters = json.loads(NESTED)
    tools = [Tool.model_validate({"function": {"name": name, "parameters": parameters}}) for name in "xy"]
    schema = demanded_schema([*tools, *TOOLS], "required", parallel=True)
    assert demanded_schema(TOOLS, "required", parallel=True).keys() == {"type", "items", "minItems"}
    vocabulary = [chr(code) for code in range(32, 127)]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0]))
    grammar = compiler.compile_json_schema(json.dumps(schema))
    assert schema["$defs"]["1"]["properties"]["$ref"] == parameters["properties"]["$ref"], "a value is no reference"
    inner = {"to": {"city": "B"}, "next": None}
    for arguments, taken in (
        (inner, True),
        ({"to": {"city": "A"}, "next": inner}, True),
        ({"to": {"city": "A"}, "next": {"to": 3}}, False),
        ({"to": {"town": "A"}, "next": None}, False),
        ({"to": {"city": "A"}, "next": None, "default": {"city": "A"}}, True),
        ({"to": {"city": "A"}, "next": None, "default": {"town": "A"}}, False),
    ):
        for name in "xy":
            text = json.dumps([{"name": name, "arguments": arguments}])
            assert xgrammar.GrammarMatcher(grammar).accept_string(text) == taken, text


def test_demanded_calls_that_never_end_are_none() -> None:
    assert read_demanded('[{"name": "a", "arguments": ' + "[" * 100_000) == []


@given(st.integers(0, 200))
def test_of_a_text_that_was_cut_short_the_whole_calls_count(length: int) -> None:
    calls = [{"name": "a", "arguments": {"x": i}} for i in range(4)]
    text = json.dumps(calls)[:length]
    found = read_demanded(text)
    assert [json.loads(call.arguments) for call in found] == [{"x": i} for i in range(text.count("}}"))]
