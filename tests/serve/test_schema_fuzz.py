"""Schemathesis against the server's own OpenAPI schema: no request is answered with a server's error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.server import NGRAM, Server, running

EXAMPLES = os.environ.get("TRTSPEC_FUZZ_EXAMPLES")
"""Number of examples per endpoint, next to schemathesis's cases for every bound; if unset, only some random ones."""


@pytest.mark.long
def test_no_request_is_answered_with_a_servers_error(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", NGRAM, ["--max-seq-len", "48"]) as server:
        run = fuzz(server, tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
        sent = re.search(r"(\d+) generated", run.stdout)
        assert sent is not None, run.stdout
        assert int(sent[1]) > 30, run.stdout
        metrics = server.get("/metrics")
        assert re.search(r'requests_total{endpoint="/v1/[\w/]+ions",status="200"}', metrics), metrics  # past all checks
        server.wait_idle()
        assert "Traceback" not in server.log.read_text()


def fuzz(server: Server, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("schemathesis")
    options = ["--checks", "not_a_server_error", "--generation-deterministic"]
    options += ["--max-examples", EXAMPLES] if EXAMPLES else ["--phases", "fuzzing", "--max-examples", "40"]
    command = [str(program), "run", f"{server.url}/openapi.json", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1500)
