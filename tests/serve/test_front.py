"""The front without an engine: how it treats a request before the engine receives it, and the engine's messages."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
import tokenizers

from tests.serve.server import DEMO
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta, EngineInfo
from trtspec.serve.http.replies import ChatLogprobs, CompletionLogprobs
from trtspec.serve.http.routes import build_app
from trtspec.serve.http.service import Service
from trtspec.serve.settings import ServeSettings
from trtspec.text import TextStream, Tokenizer

TURN = {"role": "user", "content": "Who?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEMPLATE = "{% for m in messages %}{{ m.content }}[TOOL_CALLS]{% endfor %}"


def mistral() -> Tokenizer:
    """The demo's tokenizer with two more special tokens, Mistral's marker and another."""
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


class Engine(EngineClient):
    """An engine client that keeps the messages sent to it, and answers with the tokens `says`, one per step."""

    def __init__(self, tokenizer: Tokenizer, says: list[int]) -> None:
        super().__init__({})
        self.state = "ready"
        self.info = EngineInfo("model", tokenizer.vocab_size, 512, 4, 400, "NONE", 0, False)
        self.told: list[dict[str, Any]] = []
        self.tokenizer, self.says = tokenizer, says
        self._writer = self  # type: ignore[assignment]

    def write(self, line: bytes) -> None:
        """Take a line that would go to the socket, and answer it."""
        message = json.loads(line)
        self.told.append(message)
        if "submit" not in message:
            return
        request, skip = message["submit"], message["params"].get("skip_special_tokens", True)
        text = TextStream(self.tokenizer, skip_special_tokens=skip)
        deltas = [Delta(request, 0, text.push([token]), [token], [], 0, False) for token in self.says]
        deltas.append(Delta(request, 0, text.flush(), [], [], 0, False, "stop"))
        self._take({"deltas": deltas})


def ask(engine: Engine, path: str, body: dict[str, Any] | None, max_queue: int = 256) -> httpx.Response:
    """The answer to a POST of `body`, or to a GET if there is none."""
    settings = ServeSettings(model="model", max_queue=max_queue)
    transport = httpx.ASGITransport(build_app(Service(settings, engine, engine.tokenizer)))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(post())


def chat(engine: Engine, **body: Any) -> httpx.Response:
    return ask(engine, "/v1/chat/completions", {"messages": [TURN], **body})


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_are_seen(stream: bool) -> None:
    tokenizer = mistral()
    marker, other = tokenizer.token_id("[TOOL_CALLS]"), tokenizer.token_id("[OTHER]")
    assert marker is not None
    assert other is not None
    assert tokenizer.is_special(marker)
    says = [*tokenizer.encode("ok "), other, marker, *tokenizer.encode('[{"name": "look", "arguments": {"x": 1}}]')]
    answer = chat(Engine(tokenizer, says), tools=[TOOL], stream=stream)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        content, reason = "".join(d.get("content", "") for d in deltas), events[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        calls, content = choice["message"]["tool_calls"], choice["message"]["content"]
        reason = choice["finish_reason"]
    assert [call["function"] for call in calls] == [{"name": "look", "arguments": '{"x": 1}'}]
    assert (content, reason) == ("ok ", "tool_calls")


@pytest.mark.parametrize(
    ("wish", "content"),
    [
        ({}, "so none"),
        ({"skip_special_tokens": True}, "so none"),
        ({"skip_special_tokens": False}, "so[TOOL_CALLS] none"),
    ],
)
def test_what_is_no_call_shows_special_tokens_to_those_who_ask(wish: dict[str, Any], content: str) -> None:
    tokenizer = mistral()
    says = [*tokenizer.encode("so"), tokenizer.token_id("[TOOL_CALLS]") or 0, *tokenizer.encode(" none")]
    message = chat(Engine(tokenizer, says), tools=[TOOL], **wish).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (content, None)


def test_a_chat_that_names_no_limit_may_fill_the_context() -> None:
    engine = Engine(mistral(), [1])
    assert chat(engine).status_code == 200
    (told,) = engine.told
    assert told["params"]["max_tokens"] == 400 - len(told["prompt"])  # kv_tokens = 400 is less than max_seq_len
    assert "min_tokens = 401 exceeds max_tokens" in chat(engine, min_tokens=401).text
    assert ask(engine, "/v1/completions", {"prompt": "x", "max_tokens": None}).status_code == 200
    assert engine.told[-1]["params"]["max_tokens"] == 16
    [card] = ask(engine, "/v1/models", None).json()["data"]
    assert card["max_model_len"] == 400


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": a}}]}
                ]
            },
            "arguments are not JSON",
        )
        for a in ("[" * 100_000, deep(100_000), "nonsense")
    ],
    ids=range(3),
)
def test_arguments_that_are_no_json_are_refused(body: dict[str, Any], words: str) -> None:
    answer = chat(Engine(mistral(), []), **body)
    assert (answer.status_code, words in answer.text) == (400, True)


def test_a_templates_names_are_free() -> None:
    assert chat(Engine(mistral(), [1]), chat_template_kwargs={"self": 1, "value": 2}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 70_000]}}}],
         "tool_choice": "required"},
        {"guided_choice": ["x" * 1000] * 100},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
    ],
    ids=range(3),
)  # fmt: skip
def test_all_that_must_be_compiled_is_measured(body: dict[str, Any]) -> None:
    engine = Engine(mistral(), [1])
    answer = chat(engine, **body)
    assert (answer.status_code, engine.told) == (400, [])
    assert "65536 at most" in answer.text


class Counting(Tokenizer):
    """A tokenizer that counts the texts that it encodes."""

    count = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as Tokenizer does, and count it."""
        self.count += 1
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": ["x"] * 100, "n": 2}, 400),
        ("/v1/completions", {"prompt": ["x"] * 100}, 429),
        ("/v1/chat/completions", {"messages": [TURN], "n": 9}, 429),
        ("/v1/completions", {"prompt": ["x"] * 4}, 200),
    ],
)
def test_what_there_is_no_room_for_is_not_tokenized(path: str, body: dict[str, Any], status: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    tokenizer = Counting(backend, chat_templates={"default": TEMPLATE})
    answer = ask(Engine(tokenizer, [1]), path, body, max_queue=4)
    assert (answer.status_code, tokenizer.count) == (status, 4 if status == 200 else 0)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = mistral()
    ticks, thread = 0, threading.Thread(target=tokenizer.encode, args=("def foo(x): return x\n" * 30_000,))
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        ticks += 1
    assert ticks > 10


def test_a_part_of_a_character_has_its_bytes() -> None:
    """Clients join the bytes of tokens to get characters."""
    tokenizer = mistral()
    ids = tokenizer.encode("a 𓀀", add_special_tokens=False)
    assert "\ufffd" in [tokenizer.decode([token]) for token in ids]
    deltas = [Delta(0, 0, "", [token], [], 0, False, logprobs=[[(token, -0.5, 1)]]) for token in ids]
    told = [ChatLogprobs(tokenizer, 0, False).add(delta) for delta in deltas]
    parts = [part["content"][0]["bytes"] for part in told if part is not None]
    assert b"".join(map(bytes, parts)).decode().lstrip() == "a 𓀀"


def test_of_tokens_with_one_text_the_drawn_ones_logprob_is_told() -> None:
    tokenizer = mistral()
    halves = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == "\ufffd"][:2]
    likeliest = [(halves[0], -0.5, 1), (halves[1], -3.0, 2)]
    told = CompletionLogprobs(tokenizer, True).add(Delta(0, 0, "", halves[:1], [], 0, False, logprobs=[likeliest]))
    assert told is not None
    assert (told["token_logprobs"], told["top_logprobs"]) == ([-0.5], [{"\ufffd": -0.5}])
