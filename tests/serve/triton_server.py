"""A real tritonserver on loopback: that of nvidia-pytriton, where tests/contract/run_triton.py has put it."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trtspec.serve.triton.configs import LAYOUTS

START_SECONDS = 120
MESSAGE_SECONDS = 30


def home() -> Path | None:
    """Folder with bin/ and backends/ of the server; None if there is none."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tritonserver"


class TritonServer:
    """A tritonserver with one model repository, ready on entry to its context and stopped on exit.

    models: those that clients call. options: further options of its command line.
    """

    def __init__(self, repository: Path, models: list[str], options: Sequence[str] = ()) -> None:
        self.models = models
        self.http, self.grpc, self.metrics = _free_ports(3)
        self.log = repository.with_name(f"{repository.name}.log")
        folder = home()
        assert folder is not None
        command = [str(folder / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={folder / 'backends'}"]
        command += ["--http-address=127.0.0.1", f"--http-port={self.http}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={self.grpc}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={self.metrics}", *options]
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
        """Return the JSON answer to a POST, also if it is an error: {"error": ...}."""
        try:
            with self._open(path, body) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Iterate over the events of a server-sent stream."""
        with self._open(path, body) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def figures(self) -> dict[str, float]:
        """Return trtspec's metrics by name; only one model has any."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("trtspec_")}

    def settled(self) -> dict[str, float]:
        """Return trtspec's metrics once no request is in flight."""
        deadline = time.monotonic() + 30
        before = None
        while before != (before := self.figures()) or before["trtspec_running_requests"]:
            assert time.monotonic() < deadline, f"requests do not end: {before}"
            time.sleep(0.3)
        return before

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


@dataclass(frozen=True)
class Message:
    """A message of a gRPC stream. text: None for an empty message."""

    text: str | None = None
    accepted: int = 0
    finish_reason: str | None = None
    final: bool = False
    error: str | None = None

    def __len__(self) -> int:
        return len(self.text or "")


class GrpcStream:
    """A gRPC stream of tritonclient: send one request, then iterate over its messages."""

    def __init__(self, server: TritonServer) -> None:
        import tritonclient.grpc

        self.client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self.messages: queue.Queue[Message] = queue.Queue()
        self.ended = False

    def __enter__(self) -> GrpcStream:
        self.client.start_stream(lambda result, error: self.messages.put(_message(result, error)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def send(self, model: str, body: dict[str, Any], request_id: str = "") -> None:
        self.ended = False
        self.client.async_stream_infer(
            model, grpc_inputs(model, body), request_id=request_id, enable_empty_final_response=True
        )

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def __iter__(self) -> GrpcStream:
        return self

    def __next__(self) -> Message:
        if self.ended:
            raise StopIteration
        message = self.messages.get(timeout=MESSAGE_SECONDS)
        self.ended = message.final
        return message


def _message(result: Any, error: Any) -> Message:
    if error is not None:
        return Message(error=str(error), final=True)
    final = result.get_response().parameters["triton_final_response"].bool_param

    def first(name: str) -> Any:
        array = result.as_numpy(name)
        return None if array is None else array.ravel()[0]

    text, reason = first("text_output"), first("finish_reason")
    return Message(
        text=None if text is None else text.decode(),
        accepted=int(first("total_accepted_draft_tokens") or 0),
        finish_reason=None if reason is None else reason.decode(),
        final=final,
    )


def grpc_inputs(model: str, body: dict[str, Any]) -> list[Any]:
    """Return a JSON request as tritonclient's inputs."""
    import tritonclient.grpc

    # The tensorrt_llm that clients call is that of llmapi, the first of that name.
    spec = next(spec for specs in LAYOUTS.values() for spec in specs if spec.name == model)
    dtypes = {one.name: one.dtype for one in spec.inputs}
    inputs = []
    for name, value in body.items():
        dtype = dtypes[name]
        numpy_dtype = {"STRING": np.object_, "BOOL": np.bool_, "FP32": np.float32}.get(dtype) or dtype.lower()
        array = np.array(value if isinstance(value, list) else [value], dtype=numpy_dtype)
        if dtype == "STRING":
            array = np.array([text.encode() for text in array], dtype=np.object_)
        array = array.reshape([1] * (spec.max_batch_size > 0) + [array.size])
        made = tritonclient.grpc.InferInput(name, list(array.shape), "BYTES" if dtype == "STRING" else dtype)
        made.set_data_from_numpy(array)
        inputs.append(made)
    return inputs
