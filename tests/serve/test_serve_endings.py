"""Endings that need handling: a poisoned request, and streams that outlast a stop."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config
from tests.serve.server import EAGLE3, chat_model, running

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


def test_a_poisoned_request_fails_alone(poisoned: Path, tmp_path: Path) -> None:
    def ask(tokens: list[int], count: int) -> dict[str, object]:
        return {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}

    with running(poisoned, tmp_path / "log", EAGLE3) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=ask([5, 6, 7], 200)).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**ask([5, 6, 7], 200), "stream": True}) as other:
            lines = other.iter_lines()
            texts = [json.loads(next(lines)[6:])["choices"][0]["text"]]
            failed = httpx.post(f"{server.url}/v1/completions", json=ask([5, POISON], 20), timeout=60)
            texts += [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (500, "request_failed")
        assert "NaN" in error["message"]
        assert "".join(texts) == whole
        assert server.metric("trtspec_engine_restarts_total") == 0
        server.wait_idle()


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
