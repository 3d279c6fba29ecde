"""The server's log line of acceptance and throughput.

It is written for intervals in which something ran, unless it is switched off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import NGRAM
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta, EngineLoad
from trtspec.serve.http.service import Service
from trtspec.serve.http.stats_log import write_stats
from trtspec.serve.settings import ServeSettings

PROMPT = "def secret_function(a, b):"
QUICK = "import trtspec.serve.http.stats_log as s, sys; s.write_stats.__defaults__ = (0.2,); "
RUN = "from trtspec.cli import main; sys.exit(main(sys.argv[1:]))"


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


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--disable-log-stats"], marks=pytest.mark.long)], ids=["on", "off"]
)
def test_a_server_writes_it_unless_told_not_to(model: Path, tmp_path: Path, options: list[str]) -> None:
    """A server writes its lines, here five per second, unless told not to; the engine's own process writes none."""
    command = [sys.executable, "-c", QUICK + RUN, "serve", "--model", str(model), "--port", "0", *options]
    command += ["--log-format", "json", "--spec", json.dumps(NGRAM)]
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        url = None
        while url is None and process.poll() is None:
            url = re.search(r"http://[\d.:]+", log.read_text())
            time.sleep(0.02)
        assert url is not None, log.read_text()
        time.sleep(0.6)  # while nothing runs
        body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        usage = httpx.post(f"{url[0]}/v1/completions", json=body, timeout=60).json()["usage"]
        time.sleep(0.6)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [event for event in events if event["logger"] == "trtspec.stats"]
    if options:
        assert not lines
        return
    assert sum(line.get("drafted_tokens", 0) for line in lines) == usage["speculation"]["drafted_tokens"] > 0
    assert sum(line.get("accepted_tokens", 0) for line in lines) == usage["speculation"]["accepted_tokens"]
    generated = sum(line["generated_tokens_per_second"] * line["seconds"] for line in lines)
    assert generated == pytest.approx(200, abs=1)
    asked = next(event["time"] for event in events if event["message"] == "request")
    assert all(line["time"] <= asked or line["generated_tokens_per_second"] for line in lines)
    assert "secret" not in log.read_text()
