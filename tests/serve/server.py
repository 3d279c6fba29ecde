"""A real `trtspec serve` in its own processes, and the models that it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

DEMO = Path(__file__).parents[2] / "examples" / "demo"
EAGLE3: dict[str, Any] = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}

KEY = "sk-right-horse-battery"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n<tool_call>{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)


def chat_model(folder: Path) -> Path:
    """Make the demo's target with a chat template."""
    shutil.copytree(DEMO / "target", folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@dataclass
class Server:
    """The address of a server, the process of its front, and its log."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def engine_pid(self) -> int:
        """PID of the engine's process, which is the only child of the front."""
        pid = self.maybe_engine_pid
        assert pid is not None
        return pid

    @property
    def maybe_engine_pid(self) -> int | None:
        """PID of the engine's process; None between two engines."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return next(map(int, Path(children).read_text().split()), None)

    def get(self, path: str) -> str:
        """Return the body of a path. HTTPError for a status that is not a success."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Return a metric of /metrics, summed over all labels."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, values))

    @contextmanager
    def feed(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the events of the live view's feed."""
        with httpx.stream("GET", f"{self.url}/live", timeout=20) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)

    def wait_idle(self, seconds: float = 10) -> None:
        """Wait until nothing runs, and check that no block of the KV cache is in use."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not (self.metric("trtspec_running") or self.metric("trtspec_waiting")):
                assert self.metric("trtspec_kv_used_ratio") == 0
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy after {seconds} s: {self.get('/metrics')}")

    def wait_ready(self, seconds: float = 30) -> float:
        """Wait until /ready says "ready" -> seconds waited."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            try:
                if json.loads(self.get("/ready"))["state"] == "ready":
                    return time.monotonic() - start
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not ready after {seconds} s: {self.log.read_text()}")


RUN = "from trtspec.cli import main; sys.exit(main(sys.argv[1:]))"
STATS = ("-c", f"import sys, trtspec.serve.http.stats_log as s; s.write_stats.__defaults__ = (0.2,); {RUN}")
"""The program of a server that writes its line of statistics five times a second."""


def scripted(engine: Path) -> tuple[str, str]:
    """Return the program of a server with a script as its engine; after its death, another is due in a minute."""
    code = "import sys; from trtspec.serve.engine import client; client.FIRST_DELAY = 60.0; "
    return "-c", f"{code}client.EngineClient.command = (sys.executable, '-S', {str(engine)!r}); {RUN}"


KV_BLOCKS = ("--num-kv-blocks", "4096")
"""The size of the KV cache. An engine's process that has to work it out imports torch._dynamo, which takes seconds."""


@contextmanager
def running(
    model: Path,
    log: Path,
    speculation: dict[str, Any] | None = None,
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "trtspec"),
) -> Iterator[Server]:
    """Start a server, and stop it at the end; its output goes to `log`.

    program: options with which Python runs `trtspec`.
    """
    command = [sys.executable, *program, "serve", "--model", str(model), "--port", "0", *KV_BLOCKS, *options]
    if speculation is not None:
        command += ["--spec", json.dumps(speculation)]
    environment = {"TRTSPEC_CACHE": "off", **os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, text=True, env=environment)
    try:
        yield Server(_address(process, log), process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    for _ in range(6000):
        found = re.search(r"serving \S+ at (http://[^\s\"]+)", log.read_text())
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.01)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")
