"""Masks of the tokens that a grammar allows next, with real tokenizers: bytes, characters and special tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.tokenizer_kinds import TOKENIZERS
from trtspec import StructuredOutputs
from trtspec.errors import EngineError, RequestError
from trtspec.text import Tokenizer
from trtspec.verify.grammar import GrammarCompiler, Guide

pytest.importorskip("xgrammar", reason="pip install 'trtspec[guided]'")

NAMES = ["byte_level", "byte_fallback"]
TEXT = '{"name": "dé 语", "on": true}'
SCHEMA = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"name": {"type": "string"}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
    }
)
SPARE = 40  # ids of the model that the tokenizer does not have


def guide(tokenizer: Tokenizer, wanted: StructuredOutputs, ends: set[int]) -> Guide:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + SPARE).guides(wanted, ends, 1)[0]


def allowed(made: Guide, drafts: list[int], size: int) -> list[set[int]]:
    """Ids that may be drawn for each row."""
    mask = torch.full((len(drafts) + 1, made.num_words), -1, dtype=torch.int32)
    made.fill(mask, drafts)
    return [ids_of(row, size) for row in mask]


def ids_of(row: Tensor, size: int) -> set[int]:
    return {id_ for id_ in range(size) if int(row[id_ // 32]) >> (id_ % 32) & 1}


def special(tokenizer: Tokenizer) -> set[int]:
    return {token for token in range(tokenizer.vocab_size) if not tokenizer.is_visible(token, skip_special_tokens=True)}


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_allowed_token_by_token_and_as_drafts(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    if name == "byte_fallback":  # its encoding begins with a blank that the text lacks
        ids = ids[1:] if tokenizer.decode(ids[:1]) in ("", " ") else ids
    size, end = tokenizer.vocab_size + SPARE, min(special(tokenizer))
    made = guide(tokenizer, SCHEMA, {end})
    rows = allowed(made, ids, size)
    assert all(token in row for token, row in zip(ids, rows, strict=False))
    assert all(end not in row for row in rows[:-1])
    assert rows[-1] == {end}
    nothing = special(tokenizer) | set(range(tokenizer.vocab_size, size))
    assert len(nothing) > SPARE
    assert all(not (nothing - {end}) & row for row in rows)
    for token, row in zip(ids, rows, strict=False):
        assert allowed(made, [], size) == [row]  # drafts leave no trace
        made.accept([token])
    assert allowed(made, [], size) == [{end}]


def test_rows_after_a_wrong_draft_or_an_end_are_left_alone() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    size, end = tokenizer.vocab_size + SPARE, min(special(tokenizer))
    made = guide(tokenizer, StructuredOutputs(choice=["ab", "a"]), {end})
    a, b, c = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "abc")
    everything = set(range(size))
    first, second, third, fourth = allowed(made, [a, c, b], size)
    assert a in first
    assert b in second
    assert end in second
    assert third == fourth == everything
    _, second, third, fourth = allowed(made, [a, end, end], size)
    assert end in second
    assert third == fourth == everything
    assert allowed(made, [], size) == [first]


def test_a_token_that_may_not_be_there_is_an_error() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    made = guide(tokenizer, StructuredOutputs(regex="a+"), {0})
    with pytest.raises(EngineError, match="breaks the request's structured_outputs"):
        made.accept(tokenizer.encode("b", add_special_tokens=False))


def test_a_text_must_be_able_to_end() -> None:
    with pytest.raises(RequestError, match="give stop_token_ids"):
        guide(TOKENIZERS["byte_level"], SCHEMA, set())


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "number", "multipleOf": 0.5}, "multipleOf of a number"),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 5}, "pattern with maxLength"),
        ({"type": "array", "items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"not": {"const": 1}}}}, "not"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"anyOf": [{"required": ["a"]}], "type": "object"}, "anyOf with type"),
        ({"$ref": "#/$defs/A", "minimum": 5, "$defs": {"A": {"type": "integer"}}}, r"\$ref with minimum"),
        ({"allOf": [{"type": "object"}, {"required": ["b"]}]}, "allOf with several schemas"),
        ({"properties": {"a": {"if": {}, "then": False}}}, "if"),
    ],
)
def test_what_a_grammar_cannot_enforce_is_refused(schema: dict[str, Any], ignored: str) -> None:
    """The compiler would leave it out, and the text would break the schema."""
    with pytest.raises(RequestError, match=f"the schema has {ignored}, which cannot be enforced; leave it out"):
        guide(TOKENIZERS["byte_level"], StructuredOutputs(json=schema), {0})


def test_a_schema_as_pydantic_makes_it_is_enforced() -> None:
    """Names of properties are no keywords, and notes next to a reference say nothing about the value."""
    schema = {
        "$defs": {"Kind": {"enum": ["a", "b"], "type": "string", "title": "Kind"}},
        "type": "object",
        "title": "Model",
        "properties": {
            "not": {"$ref": "#/$defs/Kind", "description": "one of two", "default": "a"},
            "contains": {"anyOf": [{"type": "integer", "multipleOf": 5}, {"type": "null"}], "default": None},
            "when": {"type": "string", "format": "date-time", "examples": [{"if": 1}]},
        },
        "required": ["not"],
    }
    tokenizer = TOKENIZERS["byte_level"]
    made = guide(tokenizer, StructuredOutputs(json=schema), {min(special(tokenizer))})
    made.accept(tokenizer.encode('{"not": "b"', add_special_tokens=False))


@pytest.mark.parametrize("choice", [['say "no"', "back\\slash", "line\nend", "语 é 😀"]])
def test_choices_may_be_any_text(choice: list[str]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = min(special(tokenizer))
    for text in choice:
        made = guide(tokenizer, StructuredOutputs(choice=choice), {end})
        made.accept([*tokenizer.encode(text, add_special_tokens=False), end])
