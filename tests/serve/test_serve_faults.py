"""Faults around a server: clients that leave or stall, an engine that dies, a full queue, and a stop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import Server, running, scripted
from tests.serve.test_engine_client import ANSWERS
from trtspec import LLM, SamplingParams

ABORTED = 'trtspec_samples_total{reason="abort"}'
LONGEST_TOKEN = 1740  # 45 characters
SOURCES = [f"def function_{i}(self, values):\n    for " for i in range(12)]


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0.7, "seed": 5, "ignore_eos": True, **more}


def expected(offline: LLM, prompts: list[str]) -> dict[str, str]:
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)
    outputs = offline.generate(list(prompts), params, use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


async def stream(
    client: httpx.AsyncClient, prompt: str, leave_after: int | None = None, pause: float = 0
) -> str | None:
    """Return the text of a stream; None if the client left it."""
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


def test_streams_next_to_deserters_and_slow_readers_are_whole(server: Server, offline: LLM) -> None:
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
    assert texts[1::2].count(None) > 6
    server.wait_idle()


def test_a_client_that_hangs_up_frees_its_request(server: Server) -> None:
    before = server.metric("trtspec_disconnects_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body("x = ", n=8, max_tokens=450), timeout=0.3)
    server.wait_idle()
    assert server.metric("trtspec_disconnects_total") == before + 1


def test_a_stream_that_is_left_counts_as_one_whose_client_went_away(server: Server) -> None:
    before, aborted = server.metric("trtspec_disconnects_total"), server.metric(ABORTED)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body("x", n=2, max_tokens=450, stream=True)) as one:
        next(one.iter_lines())
    server.wait_idle()
    assert server.metric("trtspec_disconnects_total") == before + 1
    assert server.metric(ABORTED) == aborted + 2


@pytest.fixture(scope="module")
def impatient(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("impatient") / "log"
    limits = ["--max-batch-size", "32", "--max-queue", "96", "--client-timeout", "2.5", "--engine-timeout", "6"]
    with running(model, log, None, limits) as server:
        yield server


def connect(server: Server, sent: bytes = b"", buffer: int = 65536) -> socket.socket:
    """Connect and send `sent`. buffer: number of bytes of an answer that are accepted although no code reads them."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.sendall(sent)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    rest = b""
    with connection, suppress(ConnectionError):
        while chunk := connection.recv(1 << 16):
            rest += chunk
    return rest


def request(content: bytes, length: int) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{length}\r\n\r\n".encode() + content


def status(server: Server, n: int = 1) -> int:
    return httpx.post(f"{server.url}/v1/completions", json=body("x", n=n, max_tokens=1), timeout=30).status_code


def test_who_does_not_read_counts_until_he_is_cut_off(impatient: Server) -> None:
    """A request whose client does not read counts until the client is cut off, for a stream and for one body."""
    long = {"prompt": [LONGEST_TOKEN] * 1900, "n": 64, "max_tokens": 1, "echo": True}  # 5 MB of text
    bodies = [json.dumps({**long, "stream": stream}).encode() for stream in (False, True)]
    before, steps = impatient.metric("trtspec_prompt_tokens_total"), impatient.metric("trtspec_steps_total")
    readers = [connect(impatient, request(one, len(one)), 4096) for one in bodies]
    while impatient.metric("trtspec_prompt_tokens_total") < before + 2 * 1900:
        time.sleep(0.02)
    while impatient.metric("trtspec_steps_total") == steps:
        time.sleep(0.02)
    impatient.wait_idle()  # the engine has no work left
    assert status(impatient) == 429
    end = time.monotonic() + 20
    while (last := status(impatient, n=128)) == 429 and time.monotonic() < end:
        time.sleep(0.1)
    assert last == 200
    assert all(len(rest_of(reader)) < 4_000_000 for reader in readers)
    whole = httpx.post(f"{impatient.url}/v1/completions", json=long, timeout=30)  # a client that reads gets all of it
    assert len(whole.content) == int(whole.headers["content-length"]) > 5_000_000
    first, *others = (choice["text"] for choice in whole.json()["choices"])
    assert [text[:85_000] for text in others] == [first[:85_000]] * 63


def test_who_asks_again_without_reading_is_cut_off(impatient: Server) -> None:
    """uvicorn then shows its newest request only, which waits for the first one to be read."""
    long = json.dumps({"prompt": [LONGEST_TOKEN] * 1900, "n": 64, "max_tokens": 1, "echo": True}).encode()
    reader = connect(impatient, request(long, len(long)) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 4096)
    end = time.monotonic() + 20
    while (last := status(impatient, n=128)) == 429 and time.monotonic() < end:
        time.sleep(0.1)
    assert last == 200
    assert len(rest_of(reader)) < 4_000_000


def test_a_request_ends_with_a_client_that_asks_again_meanwhile(impatient: Server) -> None:
    """Its first request still runs when the client is cut off or leaves, and ends before it has all its tokens."""
    asked = json.dumps(body("x", max_tokens=1900, ignore_eos=True)).encode()
    before = impatient.metric("trtspec_generated_tokens_total")
    both = request(asked, len(asked)) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    stays, leaves = connect(impatient, both, 4096), connect(impatient, both, 4096)
    while impatient.metric("trtspec_generated_tokens_total") == before:
        time.sleep(0.02)
    leaves.close()
    impatient.wait_idle()
    assert impatient.metric("trtspec_generated_tokens_total") - before < 2 * 1900
    assert rest_of(stays) == b""


def test_who_stops_in_the_middle_of_asking_is_cut_off(impatient: Server) -> None:
    halves = [b"", b"POST /v1/comp", request(b'{"prompt": "', 100)]
    connections = [connect(impatient, one) for one in halves]
    busy = HTTPConnection("127.0.0.1", int(impatient.url.rsplit(":", 1)[1]))
    for _ in range(17):  # a client that sends request after request on one connection is not cut off
        busy.request("GET", "/health")
        assert busy.getresponse().read() == b'{"status":"ok"}'
        time.sleep(0.2)
    busy.close()
    answers = [rest_of(connection) for connection in connections]
    assert answers[:2] == [b"", b""]
    head, _, error = answers[2].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(error)["error"]["code"] == "body_timeout"


@pytest.mark.long
def test_an_engine_that_hangs_is_killed(impatient: Server) -> None:
    first = impatient.engine_pid
    url = f"{impatient.url}/v1/completions"
    with httpx.stream("POST", url, json=body("x", max_tokens=1500, stream=True), timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(first, signal.SIGSTOP)
        rest = [line for line in lines if line]
    assert "the engine has ended" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert impatient.metric("trtspec_engine_up") == 0
    impatient.wait_ready()
    assert impatient.engine_pid != first
    assert status(impatient) == 200
    assert "it had work and said nothing for 6." in impatient.log.read_text()


def test_a_killed_engine_is_replaced_and_its_requests_end_with_an_error(impatient: Server, offline: LLM) -> None:
    first, before = impatient.engine_pid, impatient.metric("trtspec_engine_restarts_total")
    with httpx.Client(base_url=impatient.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body("x", max_tokens=1500, stream=True)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(first, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "the engine has ended" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
        refused = client.post("/v1/completions", json=body("x"))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        impatient.wait_ready()
        assert impatient.metric("trtspec_engine_restarts_total") == before + 1
        answer = client.post("/v1/completions", json=body(SOURCES[0]))
        assert answer.json()["choices"][0]["text"] == expected(offline, SOURCES[:1])[SOURCES[0]]


def test_a_full_queue_says_when_to_come_back(impatient: Server) -> None:
    """There is room for 32 + 96 samples, so for three requests of 42."""
    before = impatient.metric("trtspec_refused_total")

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=impatient.url, timeout=60) as client:
            jobs = [client.post("/v1/completions", json=body("x", n=42, max_tokens=10)) for _ in range(8)]
            return await asyncio.gather(*jobs)

    answers = asyncio.run(flood())
    codes = [answer.status_code for answer in answers]
    assert sorted(set(codes)) == [200, 429]
    assert codes.count(200) == 3
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert impatient.metric("trtspec_refused_total") == before + 5
    impatient.wait_idle()

    crowd = [connect(impatient) for _ in range(32 + 96 + 256)]  # clients that send nothing
    assert httpx.get(f"{impatient.url}/health").status_code == 503
    for one in crowd:
        one.close()
    impatient.wait_ready()


def test_the_front_does_not_import_torch(impatient: Server) -> None:
    """The front does not import torch, which takes seconds; only the engine's process does."""
    mapped = Path(f"/proc/{impatient.process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "libtorch" in Path(f"/proc/{impatient.engine_pid}/maps").read_text()


def test_told_to_stop_while_there_is_no_engine_it_stops(model: Path, tmp_path: Path) -> None:
    """A server that waits to start the next engine stops at once. A script takes the place of the engine here."""
    (tmp_path / "engine.py").write_text(ANSWERS)
    with running(model, tmp_path / "log", program=scripted(tmp_path / "engine.py")) as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        while httpx.get(f"{server.url}/ready").status_code == 200:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_told_to_stop_while_it_loads_it_stops(model: Path, tmp_path: Path) -> None:
    """A server that is told to stop while it loads stops by itself.

    The system would not stop it as process 1 of a container. Until it has loaded, it refuses connections.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trtspec", "serve", "--model", str(model), "--port", str(port)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        server = Server(f"http://127.0.0.1:{port}", process, tmp_path / "log")  # type: ignore[arg-type]
        while server.maybe_engine_pid is None:
            assert process.poll() is None
            time.sleep(0.01)
        engine = server.engine_pid
        time.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            connect(server)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
    assert "the engine is ready" not in (tmp_path / "log").read_text()


def test_it_does_not_start_what_it_cannot_serve(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"trtspec: .*config\.json"), running(tmp_path, tmp_path / "log"):
        pass
    with (
        pytest.raises(AssertionError, match=r"trtspec: tokenizer '.*' has no tokenizer\.json"),
        running(model, tmp_path / "log", options=("--tokenizer", str(tmp_path))),
    ):
        pass


def test_nothing_but_loopback_is_bound(server: Server) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    bound = {row[1].split(":")[0] for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "0A"}
    assert bound == {"0100007F"}
