"""A real tritonserver on loopback: that of nvidia-pytriton, where tests/contract/run_triton.py has put it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 120


def home() -> Path | None:
    """bin/, backends/ of the server; None where there is none."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tritonserver"


class TritonServer:
    """tritonserver with one model repository, ready; ends with its context."""

    def __init__(self, repository: Path) -> None:
        self.http, self.grpc, self.metrics = _free_ports(3)
        self.log = repository.with_name(f"{repository.name}.log")
        folder = home()
        assert folder is not None
        command = [str(folder / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={folder / 'backends'}"]
        command += ["--http-address=127.0.0.1", f"--http-port={self.http}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={self.grpc}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={self.metrics}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> TritonServer:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"tritonserver did not get ready:\n{self.log.read_text()[-6000:]}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON that a POST answers, errors as well: {"error": ...}."""
        try:
            with self._open(path, body) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a server-sent stream."""
        with self._open(path, body) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def figures(self) -> dict[str, float]:
        """Our metrics, by name: of the one model that has any."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("trtspec_")}

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self.http}/v2/models/{path}"
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=120)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
