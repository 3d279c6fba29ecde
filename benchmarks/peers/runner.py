"""Running a group of contestants in turn. One that fails is left out from then on; the others go on."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.checkpoints import Model
from benchmarks.peers.contests import LIMITS, Contest, Contestant, Group
from benchmarks.peers.environments import vllm_variables
from benchmarks.peers.process import PeerError, Worker
from benchmarks.peers.results import Run, Start
from trtspec.build.sources import DIGITS, digest
from trtspec.kv.memory import huge_pages

PREPARE_S, LOAD_S, GENERATE_S = 3600.0, 1800.0, 900.0  # time limits
PROBE_BYTES = 2**28
PROBE_S = 0.1  # for a probe's passes; short, as a probe is of one moment and bandwidth drifts within minutes


class Probe:
    """A probe of the machine's current read bandwidth, bytes per second, with torch's threads."""

    def __init__(self) -> None:
        from trtspec.ops import load_plugins

        load_plugins()
        self.data = torch.frombuffer(huge_pages(PROBE_BYTES), dtype=torch.int64).fill_(1)  # as an engine's weights lie
        self.has_kernel = hasattr(torch.ops.trtspec_probe, "read_bandwidth")

    def __call__(self) -> float:
        """Median of three to six passes without the slowest, which wakes the threads."""
        passes: list[float] = []
        begin = time.perf_counter()
        while len(passes) < 3 or (len(passes) < 6 and time.perf_counter() - begin < PROBE_S):
            passes.append(self._pass())
        return statistics.median(sorted(passes)[1:])

    def _pass(self) -> float:
        if self.has_kernel:
            return float(torch.ops.trtspec_probe.read_bandwidth(self.data))
        start = time.perf_counter()
        self.data.sum()
        return PROBE_BYTES / (time.perf_counter() - start)


@dataclass
class Runner:
    """A runner of groups.

    pythons: Python program of each peer that can run. report: called with each thing that is being done.
    """

    work: Path
    pythons: dict[str, str]
    threads: int
    repeats: int
    report: Callable[[str], None]
    runs: list[Run] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.threads)
        self.probe = Probe()

    def run(self, model: Model, group: Group) -> None:
        """Run all contests of a group; results go to runs, starts and failures."""
        with self._workers() as workers:
            for contestant in group.contestants:
                if contestant.peer in self.pythons:
                    with self._excused(f"{model.name}, {group.name}"):
                        workers[contestant] = self._start(model, group, contestant)
            prompts = {contest: model.prompts(contest.batch, contest.input_len) for contest in group.contests}
            for repeat in range(self.repeats + 1 if group.contests else 0):  # the first warms up
                for contest in group.contests:
                    stage = f"repeat {repeat} of {self.repeats}" if repeat else "warming up"
                    self.report(f"{model.name}: {contest.name}: {stage}")
                    self._turn(model, group, contest, prompts[contest], repeat, workers)
            for contestant, worker in workers.items():
                start = next(start for start in reversed(self.starts) if start.contestant == contestant)
                start.peak_rss = worker.peak_rss()

    def _turn(
        self,
        model: Model,
        group: Group,
        contest: Contest,
        prompts: list[list[int]],
        repeat: int,
        workers: dict[Contestant, Worker],
    ) -> None:
        """Run every contestant once, in an order that rotates, each between two probes of the bandwidth."""
        able = [contestant for contestant in workers if contest.batch <= contestant.max_batch]
        shift = repeat % max(len(able), 1)
        before = self.probe()
        for contestant in able[shift:] + able[:shift]:
            run = None
            with self._excused(f"{model.name}, {contest.name}", lambda c=contestant: workers.pop(c).kill()):
                timed = workers[contestant].call("generate", GENERATE_S, prompts=prompts, output_len=contest.output_len)
                workers[contestant].pause()
                run = Run(model.name, contest, contestant, repeat, **timed)
            after = self.probe()
            if run is not None and repeat:
                run.probes = (before, after)
                self.runs.append(run)
            before = after

    def _start(self, model: Model, group: Group, contestant: Contestant) -> Worker:
        """Return a loaded worker."""
        label = f"{model.name}-{group.name}-{contestant.name}".replace(" ", "-")
        request: dict[str, Any] = {
            **LIMITS,
            "model": str(model.folder),
            "speculation": contestant.speculation,
            "format": contestant.format,
            "first_prompt": model.prompts(1, 128)[0],
        }
        if contestant.peer == "trtspec" and not contestant.eager:
            self.report(f"{model.name}: building an engine for {contestant.name}, {group.name}")
            request |= self._prepare(contestant, label, "build", engines=str(self.work / "engines"), **request)
        if contestant.peer == "llama":
            request |= {"tied": model.tied, "format": contestant.variant.split()[0]}
            self.report(f"{model.name}: making the {request['format']} file of llama.cpp")
            request |= self._prepare(contestant, label, "convert", gguf=str(self._gguf(model)), **request)
        self.report(f"{model.name}: loading {contestant.name} for {group.name}")
        worker = self._worker(contestant, label)
        try:
            reply = worker.call("load", LOAD_S, **request)
        except BaseException:
            worker.kill()
            raise
        self.versions[contestant.peer] = reply["version"]
        worker.pause()
        weight_bytes = reply.get("weight_bytes", model.weight_bytes)
        self.starts.append(Start(model.name, group.name, contestant, reply["startup_s"], weight_bytes))
        return worker

    def _gguf(self, model: Model) -> Path:
        """Folder of llama.cpp's files of a checkpoint; folders of older versions of it are deleted."""
        files, here = self.work / "gguf", Path(__file__).parent
        made_of = digest(None, [model.folder], [here / "gguf_file.py", here / "in_llama.py"])
        for older in set(files.glob(f"{model.name}-" + "?" * DIGITS)) - {files / f"{model.name}-{made_of}"}:
            shutil.rmtree(older)
        return files / f"{model.name}-{made_of}"

    def _prepare(self, contestant: Contestant, label: str, op: str, **request: Any) -> dict[str, Any]:
        """Run an operation in a process of its own, whose memory and threads end with it."""
        worker = self._worker(contestant, f"{label}-{op}")
        try:
            return worker.call(op, PREPARE_S, label=label, **request)
        finally:
            worker.kill()

    def _worker(self, contestant: Contestant, label: str) -> Worker:
        python = self.pythons[contestant.peer]
        root = str(Path(__file__).resolve().parents[2])
        path = root + os.pathsep + os.environ.get("PYTHONPATH", "") if contestant.peer == "trtspec" else root
        environment = {
            "PYTHONPATH": path.rstrip(os.pathsep),
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
        }
        if contestant.peer == "vllm":
            environment |= vllm_variables(python, _cpus()[: self.threads], contestant.in_process)
            environment["VLLM_CACHE_ROOT"] = str(self.work / "vllm-cache")
        module = f"benchmarks.peers.in_{contestant.peer}"
        return Worker(contestant.name, python, module, environment, self.work / "logs" / f"{label}.log")

    @contextmanager
    def _workers(self) -> Iterator[dict[Contestant, Worker]]:
        """A dict for the caller to fill with workers; whatever happens, none is left running."""
        workers: dict[Contestant, Worker] = {}
        try:
            yield workers
            for worker in workers.values():
                worker.close()
        finally:
            for worker in workers.values():
                worker.kill()

    @contextmanager
    def _excused(self, where: str, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Turn a PeerError into a failure."""
        try:
            yield
        except PeerError as error:
            self.failures.append(f"{where}: {error}")
            self.report(self.failures[-1])
            then()


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
