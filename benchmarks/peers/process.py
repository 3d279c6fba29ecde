"""A contestant's process, as the benchmark uses it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """An error of a peer; its message is a sentence."""


class Worker:
    """A process that runs `python -m module`, which serves JSON lines (worker.py), in a process group of its own.

    The output of the process and of its libraries goes to the file `log`.
    """

    def __init__(self, name: str, python: str, module: str, environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            try:
                self.process = subprocess.Popen(
                    [python, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env={**os.environ, **environment},
                    text=True,
                    start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends the whole group
                )
            except OSError as error:
                raise PeerError(f"{name}: {python} does not start ({error.strerror})") from error

    def call(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request and return the reply. PeerError if it is an error or late, or if the process ends instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # the process has ended; the code below reports it
            self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise PeerError(f"{self.name}: {op} took more than {timeout_s:.0f} s; see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name}: ended during {op} with code {self.process.wait()}; see {self.log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.name}: {op} failed: {_first_line(reply['error'])}; see {self.log}")
        return reply

    def pause(self) -> None:
        """Stop the process until the next call: some peers' threads keep a core busy while they wait.

        Returns once the whole group stands still, so that the next measurement has the machine to itself.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + 1.0
        while any("\nState:\tT" not in status for status in self._members()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def peak_rss(self) -> int:
        """Bytes, summed over the process and all its children; memory that they share counts for each. Linux only."""
        lines = [line for status in self._members() for line in status.splitlines()]
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

    def close(self) -> None:
        """End the whole group: first by closing stdin, then by signals."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End the whole group. Processes with shared memory to remove have a few seconds for it."""
        for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
            self._signal(number)
            self._signal(signal.SIGCONT)  # a stopped process handles the signal only then
            deadline = time.monotonic() + patience_s
            while self._members() and time.monotonic() < deadline:
                time.sleep(0.02)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _members(self) -> list[str]:
        """Contents of /proc's status file of every live process of the group."""
        found = []
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(status.parent.name)) == self.process.pid and "\nState:\tZ" not in status.read_text():
                    found.append(status.read_text())
        return found


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".")[:300]
