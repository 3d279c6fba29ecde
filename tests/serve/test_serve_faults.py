"""What goes wrong around a server: clients that leave or stall, an engine that dies, a queue that is full, a stop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import EAGLE3, NGRAM, Server, running
from trtspec import LLM, SamplingParams

SOURCES = [f"def function_{i}(self, values):\n    for " for i in range(24)]


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0.7, "seed": 5, "ignore_eos": True, **more}


def expected(offline: LLM, prompts: list[str]) -> dict[str, str]:
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)
    outputs = offline.generate(list(prompts), params, use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


async def stream(
    client: httpx.AsyncClient, prompt: str, leave_after: int | None = None, pause: float = 0
) -> str | None:
    """Its text; None if it was left."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body(prompt, stream=True)) as answer:
        assert answer.status_code == 200
        count = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            text += chunk["choices"][0]["text"]
            count += 1
            if count == leave_after:
                return None
            await asyncio.sleep(pause)
    return text


def test_streams_beside_deserters_and_slow_readers_are_whole(server: Server, offline: LLM) -> None:
    rng = random.Random(1)
    wanted = expected(offline, SOURCES)

    async def all_of_them() -> list[str | None]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            jobs = [
                stream(client, prompt, leave, rng.choice([0, 0, 0.02]))
                for prompt in SOURCES
                for leave in (None, rng.randint(1, 10))
            ]
            return await asyncio.gather(*jobs)

    texts = asyncio.run(all_of_them())
    assert texts[::2] == [wanted[prompt] for prompt in SOURCES]
    assert texts[1::2].count(None) > 12
    server.wait_idle()


def test_a_client_that_hangs_up_frees_its_request(server: Server) -> None:
    before = server.metric("trtspec_disconnects_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body("x = ", n=8, max_tokens=450), timeout=0.3)
    server.wait_idle()
    assert server.metric("trtspec_disconnects_total") == before + 1


def test_a_killed_engine_is_replaced_and_its_requests_end_with_an_error(
    model: Path, offline: LLM, tmp_path: Path
) -> None:
    with running(model, tmp_path / "log", NGRAM) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body("x", max_tokens=1500, stream=True)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "the engine has ended" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
        refused = client.post("/v1/completions", json=body("x"))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        server.wait_ready()
        assert server.metric("trtspec_engine_restarts_total") == 1
        answer = client.post("/v1/completions", json=body(SOURCES[0]))
        assert answer.json()["choices"][0]["text"] == expected(offline, SOURCES[:1])[SOURCES[0]]


def test_a_full_queue_says_when_to_come_back(model: Path, tmp_path: Path) -> None:
    options = ["--max-batch-size", "2", "--max-queue", "1"]
    with running(model, tmp_path / "log", None, options) as server:

        async def flood() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                jobs = [client.post("/v1/completions", json=body("x", max_tokens=200)) for _ in range(8)]
                return await asyncio.gather(*jobs)

        answers = asyncio.run(flood())
        codes = [answer.status_code for answer in answers]
        assert sorted(set(codes)) == [200, 429]
        assert codes.count(200) == 3
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.metric("trtspec_refused_total") == 5
        server.wait_idle()


def test_told_to_stop_it_finishes_what_runs(model: Path, offline: LLM, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", EAGLE3) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body(SOURCES[0], stream=True), timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            chunks = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == expected(offline, SOURCES[:1])[SOURCES[0]]
        assert server.process.wait(20) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


def test_told_to_stop_while_there_is_no_engine_it_stops(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log") as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        while httpx.get(f"{server.url}/ready").status_code == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0


def test_it_does_not_start_what_it_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"trtspec: .*config\.json"), running(tmp_path, tmp_path / "log"):
        pass


def test_it_is_ready_soon(model: Path, tmp_path: Path) -> None:
    """No timing: what takes seconds, importing torch, is done by the engine's process alone."""
    with running(model, tmp_path / "log") as server:
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_nothing_but_loopback_is_bound(server: Server) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    bound = {row[1].split(":")[0] for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "0A"}
    assert bound == {"0100007F"}
