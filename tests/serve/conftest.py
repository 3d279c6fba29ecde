"""One server for the tests that only send requests to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server import EAGLE3, Server, chat_model, running
from trtspec import LLM

LIMITS = {"max_batch_size": 8, "max_seq_len": 512}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("serve") / "coder")


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with running(model, model.parent / "server.log", EAGLE3, options) as server:
        yield server


@pytest.fixture(scope="session")
def offline(model: Path) -> Iterator[LLM]:
    """Plain decoding of the same model, which every answer must equal."""
    with LLM(model, **LIMITS) as llm:
        yield llm
