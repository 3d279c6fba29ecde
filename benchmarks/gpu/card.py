"""The GPU of the benchmark: its clock, its copy bandwidth, and a queue that records when each launch ran."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trtspec.backends.cuda.device import WorkQueue, open_gpu

_HOLD_CYCLES = 400_000  # 0.2 ms on an H200 at 2 GHz; the host queues a step in less
_WARM_UPS = 3


class Stamp(Protocol):
    """A moment on the device."""

    def record(self) -> None:
        """Set the moment to when all work is done that was queued before on the current stream."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this moment to a later one; both have passed."""
        ...


@dataclass(frozen=True)
class Card:
    """The operations that only a GPU has. Tests use a card of the CPU."""

    device: torch.device
    about: dict[str, str]
    stamp: Callable[[], Stamp]
    hold: Callable[[], None]  # queues work that takes longer than the host takes to queue a step
    synchronize: Callable[[], None]
    release: Callable[[], None]  # returns free memory to the driver
    capture: Callable[[Callable[[], object]], Callable[[], object]]  # returns the same work at less cost for the host


def open_card() -> Card:
    """Return the GPU that torch sees first. Raises open_gpu's errors."""
    device = open_gpu()
    properties = torch.cuda.get_device_properties(device)
    about = {
        "card": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "driver": _driver(),
        "CUDA": str(torch.version.cuda),
    }
    return Card(
        device,
        about,
        lambda: torch.cuda.Event(enable_timing=True),
        lambda: torch.cuda._sleep(_HOLD_CYCLES),
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        _capture,
    )


def _capture(work: Callable[[], object]) -> Callable[[], object]:
    """Run `work`, which compiles kernels, then capture it as a CUDA graph; return the graph's replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown (no nvidia-smi)"


def versions() -> dict[str, str]:
    """Versions of the packages on which the figures depend."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return {**found, "torch": str(torch.__version__)}


def copy_bandwidth(card: Card, nbytes: int, repeats: int = 20) -> float:
    """Median bytes per second, read and written, of copies of `nbytes` on the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    stamps = []
    for _ in range(_WARM_UPS + repeats):
        first, last = card.stamp(), card.stamp()
        first.record()
        target.copy_(source)
        last.record()
        stamps.append((first, last))
    card.synchronize()
    return 2 * nbytes / (statistics.median(seconds(stamps[_WARM_UPS:])))


def seconds(stamps: list[tuple[Stamp, Stamp]]) -> list[float]:
    """Seconds from the first stamp to the second of each pair."""
    return [first.elapsed_time(last) / 1e3 for first, last in stamps]


class TimedQueue:
    """A queue that keeps the moments at which each launch begins and ends on the device.

    holds: whether the device is kept busy before each launch. Then a launch that has begun never waits for the host to
    queue the rest of it. The time between two launches has no meaning then.
    """

    def __init__(self, inner: WorkQueue, card: Card) -> None:
        self._inner, self._card = inner, card
        self.holds = False
        self.launches: list[tuple[Stamp, Stamp]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # everything but submit is the inner queue's

    def submit(self, work: Callable[[], None]) -> None:
        """Queue the work, with a stamp before it and one after it."""
        first, last = self._card.stamp(), self._card.stamp()
        self.launches.append((first, last))

        def timed() -> None:
            if self.holds:
                self._card.hold()
            first.record()
            work()
            last.record()

        self._inner.submit(timed)
