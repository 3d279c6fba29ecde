"""The live view's routes without a browser: what they send, and that viewers do not hold up the server."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.serve.server import Server
from trtspec.serve.http.live import PERIOD


def test_the_page_is_of_this_origin_alone_and_holds_nothing_inline(server: Server) -> None:
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert " style=" not in page.text
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        assert httpx.get(f"{server.url}/dashboard/{name}").headers["content-type"].startswith(kind)


@pytest.mark.parametrize("path", ["nope.js", "..%2Flive.py", "%2e%2e/live.py", "index.html%00", "__init__.py"])
def test_no_other_file_is_served(server: Server, path: str) -> None:
    answer = httpx.get(f"{server.url}/dashboard/{path}")
    assert answer.status_code == 404
    assert "there is no /" in answer.json()["error"]["message"]


def test_the_feed_tells_what_the_engine_does_four_times_a_second(server: Server) -> None:
    body = {"prompt": "def quicksort(", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    with server.feed() as events:
        first = next(events)
        start = time.monotonic()
        seen = [next(events)]
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        wanted = usage["speculation"]["drafted_tokens"]
        while len(seen) < 100 and sum(sum(event["drafted"]) for event in seen) < wanted:
            seen.append(next(events))
        seen += [next(events), next(events)]  # without new figures
        seconds = time.monotonic() - start
    assert first["name"] == "coder"
    assert first["state"] == "ready"
    assert first["needs_key"] is False
    assert "model" not in first["facts"]  # it is the folder's path
    assert first["facts"]["max_draft_len"] == 3
    assert len(seen) * PERIOD <= seconds + PERIOD
    # Each event counts what has come since the last one: nothing twice, and nothing left out.
    speculation = usage["speculation"]
    assert sum(sum(event["drafted"]) for event in seen) == speculation["drafted_tokens"]
    assert sum(sum(event["accepted"]) for event in seen) == speculation["accepted_tokens"]
    tokens = sum(event["tokens_per_second"] * event["seconds"] for event in seen)
    assert tokens == pytest.approx(100, abs=1)


def test_a_viewer_who_leaves_is_forgotten(server: Server) -> None:
    with server.feed() as events:
        next(events)
        assert server.metric("trtspec_live_viewers") >= 1
    end = time.monotonic() + 5
    while server.metric("trtspec_live_viewers") and time.monotonic() < end:
        time.sleep(0.05)
    assert server.metric("trtspec_live_viewers") == 0


def test_a_server_with_keys_shows_the_page_all_the_same(keyed: Server) -> None:
    assert httpx.get(keyed.url).status_code == 200
    assert httpx.post(f"{keyed.url}/v1/completions", json={"prompt": "x"}).status_code == 401
    with keyed.feed() as events:
        assert next(events)["needs_key"] is True
