"""Requests as clients may write them: fields that count as left out, and invalid bodies, refused fast at any length."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from trtspec.serve.http.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

MANY = 1 << 20  # items, in a body of some MiB
NAMES = [f"field{i}" for i in range(MANY // 4)]
TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("form", "body", "place"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}, ("prompt", "ids", 0)),
        (CompletionRequest, {"prompt": ["x", *[1] * MANY]}, ("prompt", "texts", 1)),
        (CompletionRequest, {"prompt": ["x"] * MANY}, ("prompt", "texts")),
        (CompletionRequest, {"prompt": [[1.5] * MANY]}, ("prompt", "lists", 0, 0)),
        (CompletionRequest, {"prompt": [[1]] * MANY}, ("prompt", "lists")),
        (CompletionRequest, {"prompt": {"a": 1}}, ("prompt",)),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(NAMES, "x")}, ("logit_bias",)),
        (CompletionRequest, {"prompt": "x", **dict.fromkeys(NAMES, 1)}, ()),
        (CompletionRequest, {"prompt": "x", "response_format": dict.fromkeys(NAMES, 1)}, ("response_format",)),
        (ChatCompletionRequest, {"messages": [1] * MANY}, ("messages", 0)),
        (ChatCompletionRequest, {"messages": [TURN] * MANY}, ("messages",)),
        (ChatCompletionRequest, {"messages": [{**TURN, "tool_calls": [1] * MANY}]}, ("messages", 0, "tool_calls", 0)),
        (ChatCompletionRequest, {"messages": [TURN], "tools": [1] * MANY}, ("tools", 0)),
    ],
    ids=range(13),
)
def test_a_body_of_wrong_items_is_refused_with_one_error(
    form: type[GenerationRequest], body: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    start = time.perf_counter()
    with pytest.raises(ValidationError) as caught:
        form.model_validate(body)
    assert [error["loc"] for error in caught.value.errors()] == [place]
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2, 3]], []])
def test_a_prompt_has_one_of_four_forms(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


def test_null_is_as_if_the_field_were_not_there() -> None:
    fields = {"n", "stream", "logprobs", "temperature", "max_tokens", "stop", "tool_choice", "prediction", "user"}
    assistant = {"role": "assistant", "content": "y", "annotations": None, "audio": None, "function_call": None}
    body = {"messages": [TURN, assistant], **dict.fromkeys(fields)}
    asked = ChatCompletionRequest.model_validate(body)
    assert asked.model_fields_set == {"messages"}
    assert asked == ChatCompletionRequest.model_validate({"messages": [TURN, {"role": "assistant", "content": "y"}]})
    assert CompletionRequest.model_validate({"prompt": "x", "echo": None, "max_tokens": None}).max_tokens == 16
    with pytest.raises(ValidationError, match="audio"):
        ChatCompletionRequest.model_validate({"messages": [{**TURN, "audio": {"id": "1"}}]})


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"modalities": ["text"], "prompt_cache_key": "a", "safety_identifier": "b", "stream": True}
    options = {"stream_options": {"include_obfuscation": False}}
    ChatCompletionRequest.model_validate({"messages": [TURN], **nothing, **options})
    for change in ({"modalities": ["audio"]}, {"stream_options": {"include_obfuscation": True}}):
        with pytest.raises(ValidationError):
            ChatCompletionRequest.model_validate({"messages": [TURN], **nothing, **change})
