"""Access to the server, limits on what may be sent, and nonsense, which has no effect."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.serve.server import DEMO, KEY, Server
from trtspec.cli.main import main
from trtspec.errors import RequestError
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta
from trtspec.serve.http.api_errors import ApiError, api_error
from trtspec.serve.http.security import Gate
from trtspec.serve.http.service import Service, Tally
from trtspec.serve.server import warn_if_open
from trtspec.serve.settings import ServeSettings
from trtspec.text import Tokenizer

GOOD = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def client(keyed: Server) -> Iterator[httpx.Client]:
    """A client that connects anew for each request."""
    with httpx.Client(base_url=keyed.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=30) as client:
        yield client


def post(client: httpx.Client, content: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return client.post("/v1/completions", content=content, headers=headers)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/nothing"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x"])
def test_without_the_key_there_is_nothing(client: httpx.Client, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = client.post(path, headers=headers, json=GOOD)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key_there_is(client: httpx.Client) -> None:
    assert post(client, json.dumps(GOOD).encode()).status_code == 200
    assert client.get("/health").status_code == 200


def test_the_time_of_a_refusal_tells_nothing_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a refusal reveals nothing about the keys.

    Every key's digest is compared, whichever is right, by a function whose time does not depend on where digests
    differ. A measurement would have to find nanoseconds in the noise of a shared machine.
    """
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("trtspec.serve.http.security.hmac.compare_digest", compare)
    keys = ["first", "second", "a third that is much longer than those"]
    gate = Gate(None, keys, 1, 1, None)  # type: ignore[arg-type]
    for guess in (*keys, "fir", "", "x" * 10_000):
        compared.clear()
        with suppress(ApiError) if guess in keys else pytest.raises(ApiError):
            gate.check_key(f"Bearer {guess}".encode())
        assert compared == [(32, 32)] * 3


def test_a_key_that_is_empty_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSPEC_API_KEY", "")
    assert main(["serve", "--model", "m"]) == 1
    assert "an API key must be printable ASCII, and not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("127.0.0.1", (), False), ("::1", (), False), ("0.0.0.0", (), True), ("::", (), True), ("10.0.0.1", (), True),
        ("0.0.0.0", (KEY,), False),
    ],
)  # fmt: skip
def test_a_server_that_is_open_to_others_says_so(
    caplog: pytest.LogCaptureFixture, host: str, keys: tuple[str, ...], warned: bool
) -> None:
    warn_if_open(host, ServeSettings(model="m", api_keys=keys))
    assert ("there is no API key" in caplog.text) is warned


def test_errors_of_templates_do_not_name_a_folder() -> None:
    target = DEMO / "target"  # has no template
    service = Service(ServeSettings(model=str(target)), EngineClient({}), Tokenizer.from_folder(target))
    with pytest.raises(RequestError, match=r"^target has no chat template"):
        asyncio.run(service.encode_chat([{"role": "user", "content": "x"}], {}))


def test_errors_of_nobodys_making_do_not_share_what_they_hold() -> None:
    first, second = (api_error(ValueError(word)) for word in ("one", "other"))
    assert first is not second


def test_a_request_that_breaks_a_step_is_not_worth_a_second_try() -> None:
    with pytest.raises(ApiError) as raised:
        Tally().add(Delta(0, 0, "", [], [], 0, False, "error", error="ValueError: poison"))
    assert raised.value.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 50_000, 400),
        (b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400),
        (b'{"prompt":"x","logit_bias":' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}", 400),
        (b'{"prompt":"\xff\xfe"}', 400),
        (b'{"prompt":"\\ud800"}', 400),
        (b'{"prompt":"x","n":1e400}', 400),
        (b'{"prompt":"x","n":' + b"9" * 5000 + b"}", 400),
        (b'{"prompt":"x","max_tokens":' + b"9" * 30 + b"}", 400),
        (b'{"prompt":"x","temperature":NaN}', 400),
        (b'{"prompt":"' + b"x" * 200_000 + b'"}', 413),
        (b"\0" * 1000, 400),
    ],
    ids=range(13),
)
def test_nonsense_is_refused(client: httpx.Client, content: bytes, status: int) -> None:
    answer = post(client, content)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_length_is_cut_off(keyed: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 10_000

    headers = {"Authorization": f"Bearer {KEY}"}
    try:
        answer = httpx.post(f"{keyed.url}/v1/completions", content=endless(), headers=headers)
    except httpx.TransportError:
        return  # cut off while the body was still being sent
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/../../etc/passwd", "//etc/passwd"]
)
def test_no_path_leads_out(keyed: Server, path: str) -> None:
    answer = raw(keyed, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert b"root:" not in answer
    assert answer.split(b" ")[1] in (b"404", b"401")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c: d\x00\r\n\r\n",
        b"GET /he\r\nX: y HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(5),
)
def test_heads_that_are_none_do_no_harm(keyed: Server, head: bytes) -> None:
    raw(keyed, head)
    assert httpx.get(f"{keyed.url}/health").status_code == 200


def test_what_a_client_names_is_not_written_into_a_head(client: httpx.Client) -> None:
    answer = post(client, json.dumps({**GOOD, "model": "x\r\nSet-Cookie: a=b"}).encode())
    assert answer.status_code == 404
    assert "set-cookie" not in answer.headers


def test_no_other_page_may_call_it(keyed: Server) -> None:
    answer = httpx.options(
        f"{keyed.url}/v1/completions",
        headers={"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"},
    )
    assert "access-control-allow-origin" not in answer.headers


def raw(server: Server, request: bytes) -> bytes:
    """Send exactly these bytes -> the bytes that come back."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except OSError:
            pass
        return answer
