"""The front's handling of an engine whose process fails; a script sends an engine's messages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtspec.errors import EngineError
from trtspec.serve.engine import client as engine_client
from trtspec.serve.engine import process
from trtspec.serve.engine.client import EngineClient, Stream

SECRET = "CUDA error in /home/somebody/models/private"
SCRIPT = """
import json, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
lines = connection.makefile("r")
options = json.loads(lines.readline())

def say(**message):
    connection.sendall(json.dumps(message).encode() + b"\\n")

FACTS = dict(
    model="m", vocab_size=9999, max_seq_len=99, max_batch_size=1, kv_tokens=99, mode="NONE", max_draft_len=0,
    lossy=False,
)
"""
READY = SCRIPT + "say(ready=FACTS)\n"
FAILS = READY + f"lines.readline(); say(failed={SECRET!r}); lines.close(); connection.close(); time.sleep(0.6)\n"
ANSWERS = READY + "for line in lines:\n    say(deltas=[], load={})\n"
HANGS = READY + "lines.readline(); say(deltas=[], load={}); time.sleep(60)\n"
DIES_YOUNG = (
    SCRIPT
    + """
import pathlib
first = pathlib.Path(__file__).with_name("first")
if first.exists():
    time.sleep(0.2)
else:
    first.touch()
    say(ready=FACTS)
"""
)


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., EngineClient]:
    """A function that makes a client whose engine is the given script."""

    def made(script: str, silence_limit: float = 60.0) -> EngineClient:
        path = tmp_path / "engine.py"
        path.write_text(script)
        client = EngineClient({}, silence_limit=silence_limit)
        client.command = (sys.executable, "-S", str(path))
        return client

    return made


def submit(client: EngineClient) -> Stream:
    return client.submit([[1, 2]], {})


async def ended(stream: Stream) -> str:
    with pytest.raises(EngineError) as raised:
        await stream.read()
    return str(raised.value)


def test_an_engine_that_has_said_its_last_word_takes_nothing_more(
    engine: Callable[..., EngineClient], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that has reported its failure receives no more requests.

    Its process may live on for seconds, for example while it releases a device.
    """

    async def run() -> None:
        client = engine(FAILS)
        await client.start()
        pid, start = client.pid, time.monotonic()
        assert pid is not None
        stream = submit(client)
        assert await ended(stream) == engine_client.GONE
        assert client.state == "restarting"
        os.kill(pid, 0)  # the process is alive
        with pytest.raises(EngineError, match="restarting"):
            submit(client)
        while client.why is None:
            await asyncio.sleep(0.05)
        assert time.monotonic() - start > 0.4
        await client.close()
        assert client.why == "exit status 0"

    asyncio.run(run())
    assert SECRET in caplog.text  # which only the operator may see


def test_it_can_be_closed_while_the_process_of_one_that_failed_lives_on(engine: Callable[..., EngineClient]) -> None:
    async def run() -> None:
        client = engine(FAILS)
        await client.start()
        pid = client.pid
        assert pid is not None
        await ended(submit(client))
        await client.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())


def test_an_engine_that_hangs_is_replaced(
    engine: Callable[..., EngineClient], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        client = engine(HANGS, silence_limit=0.3)
        await client.start()
        await asyncio.sleep(0.4)  # an engine without work may be silent
        assert client.state == "ready"
        assert client.silence == 0
        assert await asyncio.wait_for(ended(submit(client)), 5) == engine_client.GONE
        while client.state != "ready":
            await asyncio.sleep(0.02)
        assert client.why == f"exit status -{signal.SIGKILL.value}"
        await client.close()

    asyncio.run(run())
    assert "it had work and said nothing for 0." in caplog.text


def test_silence_counts_from_the_first_thing_that_is_unanswered(engine: Callable[..., EngineClient]) -> None:
    """Silence counts from the first message that is unanswered.

    Otherwise, requests that give up before the engine counts as hung would hide that it hangs.
    """

    async def run() -> None:
        client = engine(ANSWERS)
        await client.start()
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        for _ in range(4):
            stream = submit(client)
            await asyncio.sleep(0.1)
            stream.end(EngineError("too late"))
        assert client.silence > 0.35
        os.kill(pid, signal.SIGCONT)
        while client.silence:
            await asyncio.sleep(0.02)
        assert client.state == "ready"
        await client.close()

    asyncio.run(run())


def test_a_request_counts_until_it_is_closed(engine: Callable[..., EngineClient]) -> None:
    async def run() -> None:
        client = engine(ANSWERS)
        await client.start()
        stream = client.submit([[1], [2]], {"n": 3})
        stream.end(EngineError("too late"))  # its reader may not know of the end yet
        assert client.num_samples == 6
        stream.close()
        assert client.num_samples == 0
        await client.close()

    asyncio.run(run())


def test_an_engine_that_never_was_ready_has_died_young(
    engine: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that was never ready has died young, however long it took to load."""
    monkeypatch.setattr(engine_client, "YOUNG", 0.1)

    async def run() -> None:
        client, died = engine(DIES_YOUNG), []
        client.on_restart = lambda: died.append(client.why)
        await client.start()
        while len(died) < 3:
            await asyncio.sleep(0.02)
        await client.close()

    asyncio.run(run())
    assert re.findall(r"another is started in (\S+) s", caplog.text) == ["0.1", "0.2", "0.4"]


@pytest.mark.parametrize(
    ("error", "status", "answer"),
    [
        (OSError("disk full"), 1, b'{"failed":"OSError: disk full"}\n'),
        (BrokenPipeError(), 0, b""),
        (EOFError(), 0, b""),
    ],
)
def test_only_a_closed_socket_means_that_the_front_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, answer: bytes
) -> None:
    def run(server: process.EngineServer) -> None:
        raise error

    front, end = socket.socketpair()
    front.sendall(b'{"model": "m"}\n')
    monkeypatch.setattr(process, "LLM", lambda **options: SimpleNamespace(engine=None, shutdown=lambda: None))
    monkeypatch.setattr(process.EngineServer, "run", run)
    monkeypatch.setattr(process, "configure", lambda form, level: None)
    monkeypatch.setattr(process.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(process.sys, "argv", ["process", str(end.fileno()), "text", "info"])
    assert process.main() == status
    end.shutdown(socket.SHUT_WR)
    assert front.makefile("rb").read() == answer
    end.detach()  # the channel's socket has the same number, and closes it
    front.close()
