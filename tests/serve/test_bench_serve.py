"""`trtspec bench serve`: its counts and times, on made-up results and on the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.serve.server import Server
from trtspec.bench.serving import Ask, Objective, Told, arrivals, goodput, percentiles, run_clients, summary
from trtspec.cli import main
from trtspec.errors import RequestError

ASK = Ask("x", 10, 0.0)


def told(first: float, last: float, tokens: int, **more: Any) -> Told:
    return Told(ASK, first, last, num_tokens=tokens, **more)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=357)
    got = percentiles(list(values))
    assert got is not None
    assert got["mean"] == pytest.approx(1000 * values.mean())
    for p in (50, 90, 99):
        assert got[f"p{p}"] == pytest.approx(1000 * np.percentile(values, p))
    assert percentiles([]) is None
    assert percentiles([0.25]) == {"mean": 250, "p50": 250, "p90": 250, "p99": 250}


def test_goodput_counts_what_keeps_both_limits() -> None:
    results = [
        told(0.1, 1.0, 10),  # 0.1 s per token
        told(0.3, 1.2, 10),  # first token too late
        told(0.1, 2.0, 10),  # tokens too slow
        Told(ASK, error="refused"),
        told(0.2, 0.2, 1),
    ]
    result = summary(results)
    assert (result["requests"], result["failed"], result["errors"]) == (5, 1, ["refused"])
    assert result["seconds"] == 2.0
    assert goodput(results, Objective(0.25, 0.15)) == 1.0
    assert result["tokens_s"] == 31 / 2
    assert goodput(results, Objective()) == 2.0
    with pytest.raises(RequestError, match="refused"):
        summary(results[3:4])


def test_arrivals_are_a_poisson_process() -> None:
    due = [ask.due for ask in arrivals(["x"] * 4000, 1, rate=8.0, seed=0)]
    gaps = np.diff(due)
    # The mean of 4000 exponential gaps is within 5%, and their deviation within 8%, for all but one seed in 500.
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)
    assert [ask.due for ask in arrivals(["x"] * 3, 1, float("inf"), 0)] == [0, 0, 0]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asked_of(answer: Handler, count: int) -> list[Told]:
    """Return the results of requests that were all due at once, from a server that replies with `answer`."""

    async def scenario() -> list[Told]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await run_clients(f"http://127.0.0.1:{runner.addresses[0][1]}", "m", [ASK] * count, {})
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def test_times_count_from_when_a_request_was_due() -> None:
    """Times count from the moment at which a request was due.

    The server answers one request at a time. Each takes 70 ms and sends its first token after 50 ms. So the fourth of
    four requests that were due at once has its first token after 260 ms.
    """
    lock = asyncio.Semaphore()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream_options"] == {"include_usage": True}
        response = web.StreamResponse()
        async with lock:
            await asyncio.sleep(0.05)
            await response.prepare(request)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.02)
            await response.write(b'data: {"choices": [{"text": "b"}]}\n\n')
        usage = {"completion_tokens": 2, "completion_tokens_details": {"accepted_prediction_tokens": 1}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        return response

    results = sorted(asked_of(answer, 4), key=lambda one: one.first or 0)
    for place, one in enumerate(results):
        assert one.first is not None
        assert one.per_token is not None
        assert one.first >= 0.04 + 0.07 * place  # some ms less than slept, as timers and sockets are not exact
        assert one.per_token >= 0.01
        assert (one.num_tokens, one.accepted, one.error) == (2, 1, None)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "no usage"),
        (b"data: [DONE]\n\n", "no token"),
        (b"data: {oops\n\n", "JSONDecodeError"),
        (b"data: " + b"x" * 2**20, "Got more than"),
        (b'data: {"error": "the queue is full"}\n\n', "the queue is full"),
    ],
)
def test_what_no_server_should_send_fails_that_request_alone(content: bytes, error: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(content)
        return response

    (one,) = asked_of(answer, 1)
    assert one.error is not None
    assert error in one.error


def test_it_measures_the_server(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, png = tmp_path / "result.json", tmp_path / "result.png"
    command = ["bench", "serve", "--url", server.url, "--num-requests", "12", "--rate", "20", "--output-len", "16"]
    assert main([*command, "--input-chars", "80", "--slo-ttft", "60000", "--json", str(file), "--png", str(png)]) == 0
    result = json.loads(file.read_text())
    assert (result["requests"], result["failed"]) == (12, 0)
    assert result["tokens_s"] * result["seconds"] == pytest.approx(12 * 16)
    assert result["goodput_s"] == pytest.approx(result["requests_s"])
    assert 0 < result["accepted_share"] < 1
    assert result["ttft_ms"]["p50"] < result["e2e_ms"]["p50"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "time to first token" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:9", "http://no name"):
        assert main(["bench", "serve", "--url", url]) == 1
        assert "gives no model" in capsys.readouterr().err
    for url in ("localhost", "localhost:9", "http://h:1/v1", "http://h:port", "http://é..x", "http://"):
        assert main(["bench", "serve", "--url", url, "--served-name", "x", "--num-requests", "1"]) == 1
        assert f"--url '{url}' is no address of a server; give http://host:port" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", server.url, "--rate", "0"]) == 1
    assert "--rate" in capsys.readouterr().err
    for fields in ("[1", "[" * 10**5):
        assert main(["bench", "serve", "--url", server.url, "--fields", fields]) == 1
        assert "--fields" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", server.url, "--num-requests", "1", "--fields", '{"q": 1}']) == 1
    assert "unknown field 'q'" in capsys.readouterr().err
