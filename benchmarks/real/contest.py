"""The section `peers`: the same model, head and prompts in other engines, each in its best setting, in turns.

First every setting runs alone, for a round of each batch. Then only each method's fastest setting of a batch stays
loaded.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers.environments import python_of, vllm_variables
from benchmarks.peers.process import PeerError, Worker
from benchmarks.real.llama_files import files_of, llama_source, server_of
from benchmarks.real.openvino_files import folders_of
from benchmarks.real.ours import LIMITS, NAMES, Schedule, engine_of, speculation_of
from benchmarks.steps.engines import ROOT, Workshop
from examples.smollm2.__main__ import model_folder

PEERS = ("llama", "vllm", "openvino", "transformers")
LOAD_S, GENERATE_S = 900.0, 900.0  # the latter for as many prompts as run at once


@dataclass(frozen=True)
class Entry:
    """A peer in one setting.

    module: that of its worker. request: fields of its load request, in addition to those that all have. weights: the
    target's file. draws: whether it samples correctly; otherwise it runs greedy decoding only.
    """

    peer: str
    method: str
    values: str  # of the method's options
    module: str
    format: str
    request: dict[str, Any] = field(hash=False)
    weights: Path
    max_batch: int = 8
    draws: bool = True

    def takes(self, batch: int, temperature: float) -> bool:
        return batch <= self.max_batch and (self.draws or temperature == 0)

    @property
    def setting(self) -> str:
        return f"{self.method} {self.values}".strip()

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.setting}"


@dataclass
class Turn:
    """A round of one entry: all prompts of a task. Seconds and tokens include the prefill."""

    seconds: float
    tokens: int
    first_tokens: int
    request_steps: int
    texts: list[list[int]]

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Turn:
        """The turn that a worker's reply tells of."""
        texts = reply["outputs"]
        return cls(reply["seconds"], sum(map(len, texts)), reply["first_tokens"], reply["request_steps"], texts)

    @property
    def tokens_per_step(self) -> float:
        return (self.tokens - self.first_tokens) / self.request_steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Task:
    """The same task for all entries. At most `batch` requests run at once: when one ends, the next starts.

    turns: prompts of each turn. The first is the one that an entry has alone; the others are the rounds.
    warm_up: prompts that run before all of them.
    """

    turns: list[list[list[int]]]
    warm_up: list[list[int]]
    batch: int
    temperature: float
    max_tokens: int


@dataclass
class Contest:
    """A contest of engines.

    schedule: drafts by batch size, for engines that have such a setting. thresholds: settings of our EAGLE3, each with
    every K. auto: whether our methods have one more setting, "auto" for the number of drafts. prefix_caching: whether
    engines that can do so keep the KV of prompts. pythons: Python program of each peer that can run. failures:
    sentences.
    """

    shop: Workshop
    threads: int
    report: Callable[[str], None]
    schedule: Schedule | None = None
    thresholds: Sequence[float] = ()
    auto: bool = False
    prefix_caching: bool = False
    pythons: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def entries(
        self, peers: list[str], format: str, head_formats: Sequence[str], ks: list[int], p_mins: list[float]
    ) -> list[Entry]:
        """Our entries and those of `peers`, with drafts and without; a peer that is not available is a failure.

        head_formats: formats of our heads; peers have the first one.
        """
        own_ks: list[int | Literal["auto"]] = [*ks, "auto"] if self.auto else [*ks]
        found = [self._own("plain", 0, format)]
        found += [self._own(method, K, format) for method, K in product(("ngram", "suffix"), own_ks)]
        for head_format in head_formats:
            found += [
                self._own(method, K, format, head_format) for method, K in product(("eagle3", "combined"), own_ks)
            ]
            found += [
                self._own("eagle3", K, format, head_format, threshold=least)
                for K, least in product(ks, self.thresholds)
            ]
            if self.schedule is not None:
                found.append(self._own("eagle3", max(self.schedule.values()), format, head_format, self.schedule))
        makers = (self._llama, self._vllm, self._openvino, self._transformers)
        for peer in peers:
            with self._excused():
                found += dict(zip(PEERS, makers, strict=True))[peer](format, head_formats[0], ks, p_mins)
        return found

    def _own(
        self,
        method: str,
        K: int | Literal["auto"],
        format: str,
        head_format: str = "bf16",
        schedule: Schedule | None = None,
        threshold: float | None = None,
    ) -> Entry:
        engine, lookup = engine_of(self.shop, method, K, format, head_format, schedule, threshold)
        own = speculation_of(method, K, head_format, schedule, threshold)
        values = "" if method == "plain" else f"K={K}" if schedule is None else by_batch(schedule)
        values += "" if threshold is None else f", threshold {threshold:g}"
        values += f", head {head_format}" if method in ("eagle3", "combined") and head_format != format else ""
        request = {"engine": str(engine), "lookup": lookup, "speculation": own}
        weights = engine / "target" / "weights.safetensors"
        return Entry("trtspec", NAMES[method], values, "in_trtspec", format, request, weights)

    def _llama(self, format: str, head_format: str, ks: list[int], p_mins: list[float]) -> Iterator[Entry]:
        source = llama_source()
        programs = server_of(source, self.shop.work / "llama.cpp", self.threads, self.report)
        target, head = files_of(source, programs, self.shop.work / "gguf", format, head_format)
        request = {"server": str(programs / "llama-server"), "file": str(target), "draft": None}
        yield Entry("llama.cpp", "plain", "", "in_llama_server", format, request, target)
        for K in ks:
            for p_min in p_mins:
                own = {**request, "draft": str(head), "num_drafts": K, "p_min": p_min}
                values = f"K={K}, p_min={p_min:g}"
                yield Entry("llama.cpp", "EAGLE3", values, "in_llama_server", format, own, target)

    # With drafts, OpenVINO 2026.4 keeps tokens that the target would not draw: at temperature 0.8 its texts are
    # nonsense. It also keeps fewer drafts of greedy requests that come later.
    def _openvino(self, format: str, head_format: str, ks: list[int], p_mins: list[float]) -> Iterator[Entry]:
        self.pythons["openvino"] = python = self._python("openvino")
        target, head = folders_of(python, self.shop.work / "openvino", format, head_format, self.report)
        request, weights = {"folder": str(target), "draft": None}, target / "openvino_model.bin"
        yield Entry("openvino", "plain", "", "in_openvino", format, request, weights)
        for K in ks:
            own = {**request, "draft": str(head), "num_drafts": K}
            yield Entry("openvino", "EAGLE3", f"K={K}", "in_openvino", format, own, weights, draws=False)

    # With drafts, vLLM 0.32 samples at temperatures that were never set: its CPU kernel writes them to a copy.
    def _vllm(self, format: str, head_format: str, ks: list[int], p_mins: list[float]) -> Iterator[Entry]:
        if (format, head_format) != ("bf16", "bf16"):
            self.report(f"vllm is left out: it has no {format} target with a {head_format} head")
            return
        self.pythons["vllm"] = self._python("vllm")
        yield Entry("vllm", "plain", "", "in_vllm", format, {"speculation": None}, _checkpoint())
        for K in ks:
            own = {"speculation": _without_engine(K)}
            yield Entry("vllm", "EAGLE3", f"K={K}", "in_vllm", format, own, _checkpoint(), draws=False)
        if self.schedule is not None:
            config = _without_engine(max(self.schedule.values()))
            config["num_speculative_tokens_per_batch_size"] = ranges(self.schedule)
            own, values = {"speculation": config}, by_batch(self.schedule)
            yield Entry("vllm", "EAGLE3", values, "in_vllm", format, own, _checkpoint(), draws=False)

    def _transformers(self, format: str, head_format: str, ks: list[int], p_mins: list[float]) -> Iterator[Entry]:
        if format != "bf16":
            return
        self.pythons["transformers"] = self._python("transformers")
        none: dict[str, Any] = {"speculation": None}
        yield Entry("transformers", "plain", "", "in_transformers", format, none, _checkpoint(), 1)
        for K in ks:
            lookup = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4}
            own, values = {"speculation": lookup}, f"K={K}"
            yield Entry("transformers", "prompt lookup", values, "in_transformers", format, own, _checkpoint(), 1)

    def _python(self, peer: str) -> str:
        work = self.shop.work.parent / "peers"
        return python_of(peer, work / peer, work / "logs" / f"{peer}-environment.log", self.threads, self.report)

    @contextmanager
    def workers(self, entries: list[Entry], tasks: list[Task]) -> Iterator[tuple[dict[Entry, Worker], Sweep]]:
        """Workers by entry, loaded, and the turn that each entry had alone, by entry and batch.

        The workers are the fastest of each peer's method in one of `tasks`. Whatever happens, none is left running.
        """
        workers: dict[Entry, Worker] = {}
        sweep: Sweep = {}
        most = max(task.batch for task in tasks)
        try:
            for entry in entries:
                with self._excused(lambda e=entry: self._drop(workers, e)):
                    self.report(f"loading {entry.name}")
                    workers[entry] = self._load(entry, tasks[0].warm_up[0], min(most, entry.max_batch))
                    for task in tasks:
                        if entry.takes(task.batch, task.temperature):
                            self._turn(workers[entry], task, task.warm_up)
                            sweep[entry, task.batch] = turn = self._turn(workers[entry], task, task.turns[0])
                            self.report(f"{entry.name}: alone, batch {task.batch}: {turn.tokens_per_second:.0f} tok/s")
                needed = {best for task in tasks for best in fastest(sweep, task.batch)}
                for beaten in set(workers) - needed:
                    self._drop(workers, beaten)
            yield workers, sweep
        finally:
            for entry in list(workers):
                self._drop(workers, entry)

    def measure(self, workers: dict[Entry, Worker], entries: list[Entry], task: Task) -> dict[Entry, list[Turn]]:
        """Return the rounds of each entry that takes the task.

        Entries run once a round, in an order that rotates, while the others stand still. An entry that fails is removed
        from `workers`.
        """
        able = [entry for entry in entries if entry in workers and entry.takes(task.batch, task.temperature)]
        turns: dict[Entry, list[Turn]] = {entry: [] for entry in able}
        rounds = len(task.turns) - 1
        for number in range(rounds + 1):
            prompts = task.turns[number] if number else task.warm_up
            order = [entry for entry in turns if entry in workers]
            shift = number % max(len(order), 1)
            for entry in order[shift:] + order[:shift]:
                self.report(f"{entry.name}: round {number} of {rounds}")
                with self._excused(lambda e=entry: self._drop(workers, e)):
                    turn = self._turn(workers[entry], task, prompts)
                    if number:
                        turns[entry].append(turn)
        return {entry: own for entry, own in turns.items() if len(own) == rounds}

    def _turn(self, worker: Worker, task: Task, prompts: list[list[int]]) -> Turn:
        """Run the prompts, then pause the worker."""
        reply = worker.call(
            "generate", GENERATE_S * -(-len(prompts) // task.batch), prompts=prompts, at_once=task.batch,
            output_len=task.max_tokens, temperature=task.temperature, ends=ends_of(model_folder()),
        )  # fmt: skip
        worker.pause()
        return Turn.of(reply)

    def _drop(self, workers: dict[Entry, Worker], entry: Entry) -> None:
        if entry in workers:
            workers.pop(entry).kill()

    def _load(self, entry: Entry, first: list[int], batch: int) -> Worker:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        python = self.pythons.get(entry.peer, sys.executable)
        if entry.peer == "vllm":
            cpus = sorted(os.sched_getaffinity(0))[: self.threads]
            environment |= vllm_variables(python, cpus, in_process=True)
            environment["VLLM_CACHE_ROOT"] = str(self.shop.work / "vllm-cache")
        label = entry.name.replace(" ", "-").replace(",", "")
        log = self.shop.work / "logs" / f"{label}.log"
        worker = Worker(entry.name, python, f"benchmarks.peers.{entry.module}", environment, log)
        try:
            worker.call(
                "load", LOAD_S, model=str(model_folder()), first_prompt=first, format=entry.format, max_batch=batch,
                max_len=LIMITS["max_seq_len"], max_num_tokens=2048, prefix_caching=self.prefix_caching, **entry.request,
            )  # fmt: skip
        except BaseException:
            worker.kill()
            raise
        worker.pause()
        return worker

    @contextmanager
    def _excused(self, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Turn a PeerError into a failure."""
        try:
            yield
        except PeerError as error:
            self.failures.append(str(error))
            self.report(self.failures[-1])
            then()


Sweep = dict[tuple[Entry, int], Turn]


def fastest(sweep: Sweep, batch: int) -> list[Entry]:
    """Each peer's fastest setting of each method, among those that ran with this batch."""
    best: dict[tuple[str, str], Entry] = {}
    for (entry, ran), turn in sweep.items():
        if ran == batch:
            rival = best.setdefault((entry.peer, entry.method), entry)
            if turn.tokens_per_second > sweep[rival, batch].tokens_per_second:
                best[entry.peer, entry.method] = entry
    return list(best.values())


def by_batch(schedule: Schedule) -> str:
    """The schedule as text: {2: 3, 8: 1} -> "K=3 up to 2, 1 up to 8"."""
    return "K=" + ", ".join(f"{K} up to {batch}" for batch, K in schedule.items())


def ranges(schedule: Schedule) -> list[tuple[int, int, int]]:
    """The schedule in vLLM's form: {2: 3, 8: 1} -> [(1, 2, 3), (3, 8, 1)]."""
    starts = [1, *(batch + 1 for batch in schedule)]
    return [(start, batch, K) for start, (batch, K) in zip(starts, schedule.items(), strict=False)]


def _without_engine(K: int) -> dict[str, Any]:
    """The speculative_config in vLLM's form."""
    config = speculation_of("eagle3", K)
    assert config is not None
    return {name: value for name, value in config.items() if name != "one_engine"}


def _checkpoint() -> Path:
    """File of the target's original weights, bf16."""
    return model_folder() / "model.safetensors"


def ends_of(folder: Path) -> list[int]:
    """Ids that end the model's answers, from config.json."""
    ids = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    return ids if isinstance(ids, list) else [ids]


def figures(turns: dict[Entry, list[Turn]]) -> list[dict[str, Any]]:
    """Each entry's tokens a second, and the ratio of our fastest entry to it, as the median over the rounds."""

    def speed(entry: Entry) -> float:
        return statistics.median(turn.tokens_per_second for turn in turns[entry])

    ours = max((entry for entry in turns if entry.peer == "trtspec"), key=speed)
    plain = next(entry for entry in turns if entry.name == "trtspec, plain")
    rows = []
    for entry, own in turns.items():
        ratios = [best.tokens_per_second / turn.tokens_per_second for best, turn in zip(turns[ours], own, strict=True)]
        same = sum(a == b for a, b in zip(own[0].texts, turns[plain][0].texts, strict=True))
        rows.append(
            {
                "peer": entry.peer, "setting": entry.setting, "format": entry.format, "tokens_per_second": speed(entry),
                "ours_over_it": statistics.median(ratios), "tokens_per_step": own[0].tokens_per_step,
                "texts_equal_ours": same, "prompts": len(own[0].texts),
                "lossless": entry.peer != "trtspec" or same == len(own[0].texts),
                "target_bytes": entry.weights.stat().st_size,
            }
        )  # fmt: skip
    return rows
