"""One log line per request: what it says, what it never says, and input that must not forge a line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import KEY, NGRAM, Server, running
from trtspec import LLM, SamplingParams
from trtspec.errors import ConfigError
from trtspec.serve.http.request_log import Record, RequestLog, request_id
from trtspec.serve.logs import FORMATS, configure
from trtspec.serve.settings import ServeSettings

SECRET = "def secret_function(a, b):"
FORGED = "x\n2026-01-01T00:00:00.000Z INFO trtspec forged\r\x1b[31m\u2028\x85"


def events(server: Server) -> list[dict[str, Any]]:
    """Return all events of the log; each line is JSON, except one that is still being written."""
    return [json.loads(line) for line in server.log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def line_of(server: Server, identity: str) -> dict[str, Any]:
    for _ in range(500):  # the answer may arrive before its line
        if f'"id":"{identity}"' in server.log.read_text():
            break
        time.sleep(0.01)
    (found,) = [one for one in events(server) if one.get("id") == identity]
    assert found["logger"] == "trtspec.serve.requests"
    return found


def ask(server: Server, identity: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"X-Request-Id": identity, "Authorization": f"Bearer {KEY}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def test_a_request_is_one_line_without_a_word_of_it(keyed: Server) -> None:
    answer = ask(keyed, "whole-1", prompt=SECRET, max_tokens=60, temperature=0, ignore_eos=True)
    assert answer.headers["x-request-id"] == "whole-1"
    usage, line = answer.json()["usage"], line_of(keyed, "whole-1")
    assert (line["endpoint"], line["status"], line["reason"]) == ("/v1/completions", 200, "length")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 60)
    speculation = usage["speculation"]
    wanted = 1 + speculation["accepted_tokens"] / speculation["num_drafts"]
    assert line["acceptance_length"] == pytest.approx(wanted, abs=1e-3)
    assert line["tokens_per_step"] == pytest.approx(59 / speculation["steps"], abs=1e-3)  # prefill made the first token
    assert line["tokens_per_step"] < line["acceptance_length"]
    assert 0 < line["first_token_seconds"] < line["seconds"] < 60
    assert "secret" not in keyed.log.read_text()
    assert answer.json()["choices"][0]["text"] not in keyed.log.read_text()


def test_its_figures_are_those_of_the_api(model: Path, keyed: Server) -> None:
    """The figures of the line are those of the API, also where the text ends within accepted drafts."""
    asked = {"temperature": 0.0, "max_tokens": 60, "min_tokens": 30, "stop": "s"}
    usage = ask(keyed, "same-1", prompt=SECRET, **asked).json()["usage"]
    with LLM(model, NGRAM) as llm:
        stats = llm.generate(SECRET, SamplingParams(**asked))[0].speculation
    line = line_of(keyed, "same-1")
    assert line["acceptance_length"] == round(stats.acceptance_length, 3)
    assert line["tokens_per_step"] == round(stats.tokens_per_step, 3)
    assert usage["speculation"] == {
        "drafted_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "num_drafts": stats.num_drafts,
        "steps": stats.steps,
    }
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] < stats.num_accepted_tokens


def test_without_drafts_there_is_no_acceptance_length(keyed: Server) -> None:
    ask(keyed, "plain-1", prompt="for ", max_tokens=9, ignore_eos=True, num_speculative_tokens=0)
    line = line_of(keyed, "plain-1")
    assert (line["acceptance_length"], line["tokens_per_step"]) == (None, 1.0)


def test_a_stream_is_one_line_at_its_end(keyed: Server) -> None:
    answer = ask(keyed, "stream-1", prompt="for ", max_tokens=9, ignore_eos=True, stream=True)
    assert answer.headers["x-request-id"] == "stream-1"
    assert line_of(keyed, "stream-1")["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("identity", "body", "status", "reason"),
    [
        ("refused-1", {"prompt": SECRET, "no_such_field": SECRET}, 400, "invalid_request_error"),
        ("refused-2", {"prompt": SECRET, "model": SECRET}, 404, "model_not_found"),
        ("refused-3", {"prompt": "x", "max_tokens": 10**6}, 400, "context_length_exceeded"),
        ("late-1", {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "timeout": 0.01}, 408, "timeout"),
    ],
)
def test_what_went_wrong_is_a_word(
    keyed: Server, identity: str, body: dict[str, Any], status: int, reason: str
) -> None:
    assert ask(keyed, identity, **body).status_code == status
    line = line_of(keyed, identity)
    assert (line["status"], line["reason"]) == (status, reason)
    assert "secret" not in keyed.log.read_text()


def test_who_is_not_let_in_has_a_line_too(keyed: Server) -> None:
    answer = httpx.get(f"{keyed.url}/v1/models", headers={"X-Request-Id": "out-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "out-1")
    assert line_of(keyed, "out-1")["reason"] == "invalid_api_key"


def test_a_client_that_went_away_is_told_apart(keyed: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{keyed.url}/v1/completions",
            json={"prompt": "x", "n": 8, "max_tokens": 450, "ignore_eos": True},
            headers={"X-Request-Id": "gone-1", "Authorization": f"Bearer {KEY}"},
            timeout=0.3,
        )
    keyed.wait_idle()
    assert line_of(keyed, "gone-1")["reason"] == "client_gone"


def test_paths_and_ids_forge_nothing(keyed: Server) -> None:
    httpx.get(f"{keyed.url}/%0aforged%1b[31m?a=%0aforged", headers={"X-Request-Id": "forge-1"})
    assert line_of(keyed, "forge-1")["endpoint"] == "other"
    answer = httpx.get(f"{keyed.url}/health", headers={"X-Request-Id": "y" * 129})
    made = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert line_of(keyed, made)["level"] == "debug"
    assert "forged" not in keyed.log.read_text()


@pytest.mark.long
def test_the_life_of_the_engine_is_in_the_log(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", None, ["--log-format", "json"]) as server:
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        while not server.metric("trtspec_engine_restarts_total"):
            time.sleep(0.02)
        server.wait_ready()
        logged = events(server)
    ready = [one["pid"] for one in logged if one["message"] == "the engine is ready"]
    assert ready[0] == first != ready[1]
    (died,) = [one for one in logged if one["level"] == "error"]
    assert "exit status -9" in died["message"]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (b"a", True),
        (b"01-abc/DEF:{x} y", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b" ", False),
        (b"a\tb", False),
        (b"a\x7f", False),
        ("ä".encode(), False),
        (None, False),
    ],
)
def test_an_id_is_taken_over_if_it_can_be_written(given: bytes | None, taken: bool) -> None:
    assert (request_id(given).encode() == given) is taken
    assert taken or re.fullmatch("[0-9a-f]{32}", request_id(given))


@pytest.mark.parametrize("log_format", FORMATS)
def test_no_message_makes_two_lines(log_format: str) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    try:
        configure(log_format, "info", stream)
        logging.getLogger("a").info("hello %s", FORGED, extra={"fields": {"of": FORGED, "count": 2}})
        logging.getLogger("a").debug("not written")
        try:
            raise ValueError(FORGED)
        except ValueError:
            logging.getLogger("b").exception("failed")
    finally:
        logging.basicConfig(level=level, handlers=handlers, force=True)
    first, *rest = stream.getvalue().splitlines()
    assert all(c.isprintable() for c in first)
    if log_format == "json":
        event = json.loads(first)
        assert (event["message"], event["of"], event["count"]) == (f"hello {FORGED}", FORGED, 2)
        (second,) = rest
        assert json.loads(second)["exception"].endswith(f"ValueError: {FORGED}")
    else:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO a hello x\\n2026", first)
        assert first.endswith("count=2")
        assert " ERROR b failed" in rest[0]
        assert all(line.startswith("    | ") and line.isprintable() for line in rest[1:])


def test_a_request_without_an_answer_is_recorded_as_such() -> None:
    records: list[Record] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("dies")

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    with pytest.raises(RuntimeError, match="dies"):
        asyncio.run(RequestLog(app, [records.append])(scope, None, None))  # type: ignore[arg-type]
    assert (records[0].status, records[0].reason) == (499, "client_gone")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"log_format": "xml"}, "text, json"),
        ({"timeout": math.nan}, "timeout = nan must be 0.001 or more, and finite"),
        ({"drain": math.inf}, "drain = inf must be 0 or more, and finite"),
        ({"client_timeout": 0}, "client_timeout = 0 must be 0.001 or more"),
        ({"engine_timeout": -1.0}, "engine_timeout"),
    ],
    ids=str,
)
def test_settings_name_what_they_take(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeSettings(model="m", **given)
