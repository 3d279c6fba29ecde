"""Servers for the tests that only send requests to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server import EAGLE3, KEY, NGRAM, STATS, Server, chat_model, running
from trtspec import LLM

LIMITS = {"max_batch_size": 8, "max_seq_len": 2048}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("serve") / "coder")


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with running(model, model.parent / "server.log", EAGLE3, options) as server:
        yield server


@pytest.fixture(scope="session")
def keyed(model: Path) -> Iterator[Server]:
    """A server that asks for KEY, takes bodies of 100 kB at most, and logs all that happens, as JSON.

    Its line of statistics comes five times a second.
    """
    options = ["--api-key", KEY, "--max-body", "100000", "--timeout", "20"]
    options += ["--log-format", "json", "--log-level", "debug"]
    with running(model, model.parent / "keyed.log", NGRAM, options, STATS) as server:
        yield server


@pytest.fixture(scope="session")
def offline(model: Path) -> Iterator[LLM]:
    """Plain decoding of the same model, which every answer must equal."""
    with LLM(model, **LIMITS) as llm:
        yield llm
