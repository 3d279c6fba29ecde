"""Streamed chat through OpenAI's own client: several answers at once, and calls that the model makes by itself."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.serve.server import Server

MESSAGES = [{"role": "user", "content": "Sort"}]
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALLS = '<tool_call>{"name": "lookup", "arguments": {"of": "Ada"}}</tool_call>'


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_answers_that_come_at_once_are_told_apart(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "coder", "messages": MESSAGES, "max_tokens": 30, "temperature": 1, "seed": 3, "n": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**request).choices
    texts: dict[int, str] = dict.fromkeys(range(3), "")
    roles: list[int] = []
    reasons: dict[int, str] = {}
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            roles += [choice.index] if choice.delta.role == "assistant" else []
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert sorted(roles) == [0, 1, 2]
    assert texts == {choice.index: choice.message.content for choice in whole}
    assert reasons == {choice.index: choice.finish_reason for choice in whole}
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.long), 2])
def test_calls_that_the_model_makes_of_itself(client: openai.OpenAI, calls: int) -> None:
    """Tool calls are found in the model's text, which a regex fixes here."""
    said = "Well. " + CALLS * calls
    request: dict[str, Any] = {
        "model": "coder", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150, "temperature": 0,
        "extra_body": {"guided_regex": re.escape(said)},
    }  # fmt: skip
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert (whole.message.content or "").strip() == "Well."
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **request)]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    made = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert text.strip() == "Well."
    assert [call.index for call in made] == list(range(calls))
    assert chunks[-1].finish_reason == "tool_calls"
    for call in [*made, *(whole.message.tool_calls or ())]:
        assert call.function is not None
        assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", {"of": "Ada"})
    assert len(whole.message.tool_calls or ()) == calls
    assert len({call.id for call in made}) == calls
