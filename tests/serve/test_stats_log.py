"""The server's log line of acceptance and throughput.

It is written for intervals in which something ran, unless it is switched off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import KEY, NGRAM, STATS, Server, running
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta, EngineLoad
from trtspec.serve.http.service import Service
from trtspec.serve.http.stats_log import write_stats
from trtspec.serve.settings import ServeSettings

PROMPT = "def secret_function(a, b):"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "trtspec.stats"]
    return [record.fields for record in records if record.getMessage() == "stats"]  # type: ignore[attr-defined]


def test_it_comes_while_something_runs_or_came_and_not_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trtspec.stats")
    service = Service(ServeSettings(model="model"), EngineClient({}), None)
    counted: list[int] = []

    async def interval() -> None:
        await asyncio.sleep(0.3)
        counted.append(len(lines_of(caplog)))

    async def run() -> None:
        writer = asyncio.create_task(write_stats(service, 0.2))
        await asyncio.sleep(0.05)
        await interval()  # no request has come
        service.metrics.prompt_tokens.inc(5)
        service.metrics.count(Delta(0, 0, "a", [1], [], 0, True))
        for drafted, accepted in ((3, 2), (3, 0), (0, 0)):
            service.metrics.count(Delta(0, 0, "a", [1] * (accepted + 1), [1] * drafted, accepted, False))
        service.client.load = EngineLoad(running=1, waiting=2, kv_used=0.5)
        await interval()
        service.client.load = EngineLoad()
        before = len(lines_of(caplog))
        await asyncio.sleep(0.5)
        counted.append(len(lines_of(caplog)) - before)
        writer.cancel()

    asyncio.run(run())
    assert (counted[0], counted[2]) == (0, 0)
    line = lines_of(caplog)[0]
    assert (line["running"], line["waiting"], line["kv_used"]) == (1, 2, 0.5)
    assert (line["acceptance_length"], line["accepted_tokens"], line["drafted_tokens"]) == (2.0, 2, 6)
    assert line["tokens_per_step"] == round(5 / 3, 3)
    assert line["acceptance_per_position"] == [0.5, 0.5, 0.0]
    assert line["generated_tokens_per_second"] == pytest.approx(6 / line["seconds"], abs=0.2)  # both are rounded
    assert line["prompt_tokens_per_second"] == pytest.approx(5 / line["seconds"], abs=0.2)
    json.dumps(line, allow_nan=False)


def events_of(log: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, log.splitlines()) if event["logger"] == "trtspec.stats"]


def ask(server: Server) -> dict[str, Any]:
    """Return the usage of a request, and wait for the line of its last interval."""
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60).json()
    time.sleep(0.5)
    return dict(answer["usage"])


def test_a_server_writes_it(keyed: Server) -> None:
    """A server writes its lines, here five per second; the engine's own process writes none."""
    keyed.wait_idle()
    time.sleep(0.5)  # for the line of what ran before
    start = len(keyed.log.read_text())
    time.sleep(0.3)
    assert not events_of(keyed.log.read_text()[start:]), "nothing runs"
    usage = ask(keyed)
    log = keyed.log.read_text()[start:]
    lines = events_of(log)
    assert sum(line.get("drafted_tokens", 0) for line in lines) == usage["speculation"]["drafted_tokens"] > 0
    assert sum(line.get("accepted_tokens", 0) for line in lines) == usage["speculation"]["accepted_tokens"]
    generated = sum(line["generated_tokens_per_second"] * line["seconds"] for line in lines)
    assert generated == pytest.approx(200, abs=1)
    asked = next(event["time"] for event in map(json.loads, log.splitlines()) if event["message"] == "request")
    assert all(line["time"] <= asked or line["generated_tokens_per_second"] for line in lines)
    assert "secret" not in log


@pytest.mark.long
def test_a_server_writes_none_where_it_is_told_not_to(model: Path, tmp_path: Path) -> None:
    options = ["--log-format", "json", "--disable-log-stats"]
    with running(model, tmp_path / "log", NGRAM, options, STATS) as server:
        ask(server)
    assert not events_of((tmp_path / "log").read_text())
