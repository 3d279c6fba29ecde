"""OpenAI's own client against the server: the answers equal plain decoding offline."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.serve.server import Server
from trtspec import LLM, SamplingParams

PROMPTS = ["def quicksort(", "import os\n\n\nclass ", "    for i in range(", "# Read a file and "]


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def offline_texts(llm: LLM, prompts: list[Any], **params: Any) -> list[list[str]]:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [[one.text for one in output.outputs] for output in outputs]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "coder"


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_completions_are_those_of_plain_decoding(client: openai.OpenAI, offline: LLM, params: dict[str, Any]) -> None:
    answer = client.completions.create(model="coder", prompt=PROMPTS, max_tokens=24, n=2, **params)
    expected = [text for texts in offline_texts(offline, PROMPTS, max_tokens=24, n=2, **params) for text in texts]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens > 0 < details.rejected_prediction_tokens
    ended = sum(choice.finish_reason == "stop" for choice in answer.choices)
    assert ended == 0
    assert answer.usage.completion_tokens == 8 * 24


def test_streams_join_to_the_same_texts(client: openai.OpenAI, offline: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 30, "n": 2}
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    usage = None
    chunks = client.completions.create(
        model="coder", prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **params
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert [texts] == offline_texts(offline, PROMPTS[:1], **params)
    assert reasons == ["length", "length"]
    assert usage is not None
    assert usage.completion_tokens == 60


def test_token_ids_go_in_and_come_out(client: openai.OpenAI, offline: LLM) -> None:
    assert offline.tokenizer is not None
    ids = offline.tokenizer.encode(PROMPTS[0])
    answer = client.completions.create(
        model="coder", prompt=ids, max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    (output,) = offline.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0))
    assert answer.choices[0].text == output.outputs[0].text
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == output.outputs[0].token_ids


def test_stop_strings_echo_and_vllms_fields(client: openai.OpenAI, offline: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    answer = client.completions.create(model="coder", prompt=PROMPTS[0], stop=["\n"], echo=True, **params)
    (expected,) = offline_texts(offline, PROMPTS[:1], stop=["\n"], **params)
    assert answer.choices[0].text == PROMPTS[0] + expected[0]
    assert answer.choices[0].finish_reason == "stop"
    extra = {"top_k": 3, "min_p": 0.05, "min_tokens": 5, "ignore_eos": True}
    answer = client.completions.create(
        model="coder", prompt=PROMPTS[1], max_tokens=20, temperature=1.0, seed=3, extra_body=extra
    )
    assert (
        answer.choices[0].text
        == offline_texts(offline, PROMPTS[1:2], max_tokens=20, seed=3, temperature=1.0, **extra)[0][0]
    )


def test_chat_and_its_stream(client: openai.OpenAI, offline: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": [{"type": "text", "text": "Sort"}, {"type": "text", "text": "a list"}]},
    ]
    answer = client.chat.completions.create(model="coder", messages=messages, max_completion_tokens=25, temperature=0)
    plain = [messages[0], {"role": "user", "content": "Sort\na list"}]
    (output,) = offline.chat(plain, SamplingParams(max_tokens=25, temperature=0))
    (same,) = offline.chat(messages, SamplingParams(max_tokens=25, temperature=0))
    assert same.prompt_token_ids == output.prompt_token_ids
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", output.outputs[0].text)
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(
            model="coder", messages=messages, max_completion_tokens=25, temperature=0, stream=True
        )
    ]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_stream_tells_accepted_rejected_and_bonus_tokens(client: openai.OpenAI) -> None:
    steps = []
    text = ""
    for chunk in client.completions.create(
        model="coder", prompt=PROMPTS[0], max_tokens=60, temperature=0, stream=True,
        extra_body={"return_speculation": True},
    ):  # fmt: skip
        assert chunk.choices[0].model_extra is not None
        steps.append(chunk.choices[0].model_extra["speculation"])
        text += chunk.choices[0].text
    said = "".join(token for step in steps for token in step["accepted"] + step["bonus"])
    assert said == text
    assert any(step["accepted"] for step in steps)
    assert any(step["rejected"] for step in steps)
    assert all(len(step["accepted"]) + len(step["rejected"]) == step["draft_len"] for step in steps[:-1])


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "there is no model 'gpt-4' here"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 10**9}, 400, "exceed the context of 2048"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [1, 99999]}, 400, "token id 99999"),
        ({"prompt": "x " * 3000}, 400, "exceed the context"),
        ({"n": 10**6}, 400, "n: "),
        ({"prompt": ["x"] * 100, "n": 100}, 400, "10000 samples"),
        ({"suffix": "x"}, 400, "suffix is not supported"),
        ({"best_of": 3}, 400, "best_of = 3"),
        ({"extra_body": {"frobnicate": 1}}, 400, "unknown field 'frobnicate'"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, 400, "min_tokens = 9 exceeds max_tokens = 3"),
        ({"stream_options": {"include_usage": True}}, 400, "stream=true"),
        ({"stop": [""]}, 400, "stop"),
    ],
    ids=str,
)
def test_errors_are_those_the_client_knows(
    client: openai.OpenAI, change: dict[str, Any], status: int, words: str
) -> None:
    request: dict[str, Any] = {"model": "coder", "prompt": "x", "max_tokens": 4, **change}
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        client.completions.create(**request)
    assert caught.value.status_code == status
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}


def test_a_deadline_ends_a_request(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.APIStatusError, match=r"more than 0\.05 s") as caught:
        client.completions.create(
            model="coder", prompt="x", max_tokens=400, extra_body={"timeout": 0.05, "ignore_eos": True}
        )
    assert caught.value.status_code == 408
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match=r"more than 0\.2 s"):
        for _ in client.completions.create(
            model="coder", prompt=["x"] * 8, n=16, max_tokens=400, stream=True,
            extra_body={"timeout": 0.2, "ignore_eos": True},
        ):  # fmt: skip
            pass
    server.wait_idle()


def test_operators_are_answered(server: Server) -> None:
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert json.loads(server.get("/ready"))["state"] == "ready"
    assert set(json.loads(server.get("/version"))) == {"version"}
    assert server.metric("trtspec_generated_tokens_total") > 0
    assert 0 < server.metric("trtspec_accepted_tokens_total") < server.metric("trtspec_draft_tokens_total")
    assert server.metric("vllm:spec_decode_num_drafts_total") == server.metric("trtspec_drafts_total") > 0
    assert server.metric("trtspec_time_to_first_token_seconds_count") > 0


def test_a_request_may_decode_plainly(client: openai.OpenAI, server: Server) -> None:
    drafted = []
    texts = set()
    for K in (0, 1, 3, 99):
        answer = client.completions.create(
            model="coder", prompt=PROMPTS[0], max_tokens=40, temperature=0, extra_body={"num_speculative_tokens": K}
        )
        texts.add(answer.choices[0].text)
        assert answer.usage is not None
        assert answer.usage.model_extra is not None
        drafted.append(answer.usage.model_extra["speculation"]["drafted_tokens"])
    assert len(texts) == 1
    assert drafted[0] == 0 < drafted[1] < drafted[2] == drafted[3]


def test_penalties_and_biases_are_heard(client: openai.OpenAI, offline: LLM) -> None:
    said = offline.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    banned = said.token_ids[0]
    answer = client.completions.create(
        model="coder",
        prompt=PROMPTS[0],
        logit_bias={str(banned): -100},
        extra_body={"repetition_penalty": 1.2},
        **params,
    )
    (expected,) = offline_texts(offline, PROMPTS[:1], logit_bias={banned: -100}, repetition_penalty=1.2, **params)
    assert answer.choices[0].text == expected[0] != said.text


def test_logprobs_are_those_of_plain_decoding(client: openai.OpenAI, offline: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 2, "max_tokens": 20}
    (output,) = offline.generate(PROMPTS[0], SamplingParams(logprobs=3, **params))
    expected = output.outputs[0].logprobs
    assert expected is not None
    answer = client.completions.create(model="coder", prompt=PROMPTS[0], logprobs=3, **params)
    got = answer.choices[0].logprobs
    assert got is not None
    drawn = [next(iter(entry.values())) for entry in expected]
    assert got.tokens == [one.decoded_token for one in drawn]
    assert got.token_logprobs == pytest.approx([one.logprob for one in drawn], abs=1e-6)
    assert got.top_logprobs is not None
    for entry, words in zip(expected, got.top_logprobs, strict=True):
        assert words == pytest.approx({one.decoded_token: one.logprob for one in entry.values()}, abs=1e-6)
    assert got.text_offset == [len("".join(got.tokens or ())[:i]) for i in _starts(got.tokens or [])]


def _starts(words: list[str]) -> list[int]:
    return [sum(map(len, words[:i])) for i in range(len(words))]


def test_chat_logprobs_in_one_piece_and_in_parts(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "coder", "messages": [{"role": "user", "content": "Sort"}], "max_tokens": 15, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert "".join(one.token for one in content) == whole.message.content
    for one in content:
        assert [len(one.top_logprobs), one.top_logprobs[0].token] == [2, one.token]  # greedy: the likeliest token
        assert one.top_logprobs[0].logprob == one.logprob > one.top_logprobs[1].logprob
        assert bytes(one.bytes or ()).decode() == one.token
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **request)]
    assert [one for part in parts if part is not None for one in part.content or ()] == content


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_binds_the_text(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "coder", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100, "temperature": 1,
        "seed": 4, "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    }  # fmt: skip
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **request))
    else:
        text = client.chat.completions.create(**request).choices[0].message.content or ""
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 99


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", "[a-c]{3,5}-[0-9]", r"[a-c]{3,5}-[0-9]"),
        ("guided_choice", ["yes", "no", "perhaps"], "yes|no|perhaps"),
        ("guided_grammar", 'root ::= "x" ("=" [0-9])+ ";"', r"x(=[0-9])+;"),
    ],
)
def test_vllms_guided_fields(client: openai.OpenAI, field: str, value: Any, pattern: str) -> None:
    extra = {field: value, "frequency_penalty": 1.5}
    answer = client.completions.create(
        model="coder", prompt="answer: ", max_tokens=60, temperature=1, seed=1, extra_body=extra
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look it up.", "parameters": SCHEMA},
}
OTHER = {"type": "function", "function": {"name": "quit", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lookup"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_demanded_tool_calls_keep_their_schema(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "coder", "messages": [{"role": "user", "content": "Who?"}], "tools": [TOOL, OTHER], "max_tokens": 200,
        "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "seed": 8,
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **request))
        (delta,) = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].delta.tool_calls]
        (call,), reason = delta, chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**request).choices[0]
        (call,), reason = answer.message.tool_calls or (), answer.finish_reason
    assert reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "lookup":
        assert set(arguments) == {"name", "age"}
    else:
        assert (choice, call.function.name) == ("required", "quit")


def test_tools_that_may_be_called_leave_text_that_calls_none_as_it_is(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "coder", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 30, "temperature": 0
    }  # fmt: skip
    answer = client.chat.completions.create(tools=[TOOL], **request).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None
    history = [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Ada, 36"},
    ]
    assert client.chat.completions.create(**{**request, "messages": history}).choices[0].message.content


def test_a_conversation_goes_on_until_the_context_is_full(client: openai.OpenAI, offline: LLM) -> None:
    """Chat answers equal those offline, also where the context becomes full for want of a limit.

    Fields that are not set are null, and the client's own message is sent back.
    """
    messages: list[Any] = [{"role": "user", "content": "x = 1\n" * 507}]
    for limit in (None, 5):
        answer = client.chat.completions.create(
            model="coder", messages=messages, temperature=0, max_tokens=limit, n=None, logprobs=None, stream=None
        ).choices[0]
        (output,) = offline.chat(messages, SamplingParams(max_tokens=limit, temperature=0))
        assert answer.message.content == output.outputs[0].text
        assert answer.finish_reason == output.outputs[0].finish_reason
        messages = [{"role": "user", "content": "x"}, answer.message.model_dump()]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"logit_bias": {"x": 1}}, "no token id"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"guided_regex": "("}, "regex"),
        ({"guided_choice": []}, "choice"),
        ({"guided_json": "{"}, "json"),
        ({"guided_json": {"type": "nonsense"}}, "json"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "65536 at most"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "one of them"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs"),
    ],
    ids=range(10),
)
def test_what_cannot_be_asked_of_the_sampler_is_said(client: openai.OpenAI, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(model="coder", prompt="x", max_tokens=4, extra_body=extra)
