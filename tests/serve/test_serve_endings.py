"""Endings that need handling: a poisoned request, and streams that outlast a stop."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config
from tests.serve.server import EAGLE3, chat_model, running
from trtspec import LLM, SamplingParams

POISON = 300
"""A token whose rows are NaN."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = chat_model(tmp_path_factory.mktemp("poisoned") / "coder")
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]  # [V, H]
    weights["lm_head.weight"] = embedding.clone()
    embedding[POISON] = float("nan")
    save_file(weights, model / "model.safetensors")
    edit_config(model, tie_word_embeddings=False)
    return model


def test_a_poisoned_request_fails_alone_and_a_stop_waits_for_what_runs(poisoned: Path, tmp_path: Path) -> None:
    """A poisoned request fails alone. A server that is told to stop finishes what runs, also while somebody looks on.

    The live view's feed ends, and not within an event. It does not last for the whole drain.
    """
    with LLM(poisoned, num_kv_blocks=64) as llm:
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        whole = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].text

    def ask(tokens: list[int], **more: Any) -> dict[str, Any]:
        return {"prompt": tokens, "max_tokens": 100, "temperature": 0, "ignore_eos": True, **more}

    def text(lines: Iterable[str]) -> str:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with running(poisoned, tmp_path / "log", EAGLE3, ["--drain", "30"]) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=ask([5, 6, 7], stream=True), timeout=60) as other:
            lines = other.iter_lines()
            first = next(lines)
            failed = httpx.post(url, json=ask([5, POISON], max_tokens=20), timeout=60)
            assert text((first, *lines)) == whole
        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (500, "request_failed")
        assert "NaN" in error["message"]
        assert server.metric("trtspec_engine_restarts_total") == 0
        server.wait_idle()

        with server.feed() as events:
            next(events)
            with httpx.stream("POST", url, json=ask([5, 6, 7], stream=True), timeout=60) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                server.process.send_signal(signal.SIGTERM)
                start = time.monotonic()
                assert text((first, *lines)) == whole
            for _ in events:
                pass
            assert server.process.wait(20) == 0
        assert time.monotonic() - start < 15
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


@pytest.mark.long
@pytest.mark.parametrize("second_signal", [True, False])
def test_streams_that_outlast_the_drain_are_ended(model: Path, tmp_path: Path, second_signal: bool) -> None:
    options = ["--drain", "600" if second_signal else "1"]
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with running(model, tmp_path / "log", None, options) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            if second_signal:
                time.sleep(0.2)
                server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            assert "the server is shutting down" in json.loads(rest[-2][6:])["error"]["message"]
        assert server.process.wait(20) == 0
        assert second_signal or time.monotonic() - start >= 1
