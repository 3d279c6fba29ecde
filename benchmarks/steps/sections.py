"""The sections: the engines that take turns, and the limits that their figures must meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.checkpoints import Model
from benchmarks.steps.engines import Workshop
from benchmarks.steps.results import Figure, Result, per_round, ratios
from benchmarks.steps.rounds import Contestant, Turn, take_turns
from benchmarks.steps.start import start
from trtspec import LLM
from trtspec.core import Proposal, StepInputs, StepOutputs
from trtspec.engine.core import EngineCore
from trtspec.protocols import DraftRequest, Executable

K = 3
SMALL_VOCAB = 4096
INPUT_LEN = 128
LIMITS = {"max_batch_size": 8, "max_seq_len": 1024}
DEMO_BATCH = 32
MEMORY_ALLOWANCE = 250 * 2**20 / 1e6  # MB for Python, torch and everything except weights and KV

Report = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """The state that all sections share. steps: number that is timed in a turn."""

    workshop: Workshop
    model_name: str
    rounds: int
    steps: int
    threads: int
    probe: Callable[[], float]
    report: Report

    def model(self) -> Model:
        return self.workshop.model(self.model_name)

    def plain(self) -> str:
        """Return the engine folder of the model without speculation."""
        return str(self.workshop.engine(f"{self.model_name}-plain", self.model().folder, None, **LIMITS))

    def take_turns(self, section: str, contestants: Sequence[Contestant]) -> Any:
        return take_turns(contestants, self.rounds, self.probe, lambda what: self.report(f"{section}: {what}"))


class Guesses:
    """A drafter that takes no time: its drafts are `length` ids that count up from the last token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.length = 0

    def use(self, length: int) -> None:
        """Set the number of drafts of a request from now on."""
        self.length = length

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return the same number of drafts for each request, at most its max_draft_len."""
        drafts = [[(r.tokens[-1] + 1 + j) % self.vocab_size for j in range(self.length)] for r in requests]
        lengths = [min(self.length, request.max_draft_len) for request in requests]
        return Proposal(
            torch.tensor(drafts, dtype=torch.int64).view(len(requests), self.length),
            torch.tensor(lengths, dtype=torch.int32),
        )

    def forget(self, request_id: int) -> None:
        """Do nothing, as this drafter keeps no state of a request."""


class Recorded:
    """An executable that runs in its first turn and returns the recorded outputs in later turns.

    Later turns must ask for the same. Only the host's part of a step is then left, as fast as it is when no graph has
    displaced the host's data from the CPU's caches.
    """

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.outputs: list[StepOutputs] = []
        self.given: Iterator[StepOutputs] | None = None

    def rewind(self) -> None:
        """Begin a turn."""
        self.given = iter(self.outputs) if self.outputs else None

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Return the next recorded outputs, or run the executable and record its outputs."""
        if self.given is not None:
            return next(self.given)
        self.outputs.append(self.inner.run(inputs))
        return self.outputs[-1]


def rows(bench: Bench) -> Result:
    """Time one engine with one copy of the weights; the drafter sets the number of rows of a step."""
    model = bench.model()
    drafter = Guesses(model_vocab(model))
    speculation = {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": 7}
    with opened(bench.plain(), speculation, force_num_accepted_tokens=0) as engine:
        prompts = model.prompts(1, INPUT_LEN)
        contestants = [
            Contestant(rows_name(n), engine, prompts, bench.steps, n - 1, prepare=partial(drafter.use, n - 1))
            for n in (1, 4, 8)
        ]
        turns = bench.take_turns("rows", contestants)
        notes = [f"rows: {huge_pages()}"]
    one, four, eight = (contestant.name for contestant in contestants)
    return Result(
        "rows",
        [
            Figure("step of 4 rows / of 1 row", ratios(turns, four, one), "x", 1.08),
            Figure("step of 8 rows / of 1 row", ratios(turns, eight, one), "x", 1.2),
        ],
        turns,
        notes,
    )


def eagle3(bench: Bench) -> Result:
    """Time plain decoding and four heads, each in an engine of its own, over the same number of tokens."""
    model = bench.model()
    accepted = 2
    small, full = min(SMALL_VOCAB, model_vocab(model)), model_vocab(model)
    heads = {f"{small} ids": (small, None), f"{full} ids": (full, None)}
    heads |= {f"{full} ids, {kind}": (full, kind) for kind in ("int8", "int4_g128")}
    few, *others = heads
    with ExitStack() as stack:
        plain = stack.enter_context(opened(bench.plain()))
        prompts = model.prompts(1, INPUT_LEN)
        contestants = [Contestant("plain", plain, prompts, bench.steps * (accepted + 1), 0)]
        for name, (size, quantization) in heads.items():
            folder = head_engine(bench, model, size, quantization)
            engine = stack.enter_context(opened(folder, force_num_accepted_tokens=accepted))
            contestants.append(Contestant(name, engine, prompts, bench.steps, K))
        turns = bench.take_turns("eagle3", contestants)
        pages = huge_pages()
    speeds = ratios(turns, few, "plain", lambda turn: turn.tokens_per_second)
    return Result(
        "eagle3",
        [
            Figure(f"tokens/s, {few}, {accepted} accepted / plain", speeds, "x", 2.1, at_least=True),
            Figure(f"step with {few} / plain", ratios(turns, few, "plain"), "x"),
            *(Figure(f"step with {name} / plain", ratios(turns, name, "plain"), "x", 1.4) for name in others),
            Figure(
                "bandwidth of a plain step / probed",
                per_round(turns, "plain", lambda turn: turn.bandwidth_share),
                "share",
                0.92,
                at_least=True,
            ),
        ],
        turns,
        [
            f"eagle3: {pages}",
            f"eagle3: random heads, K = {K}, bf16 if not quantised; {accepted} drafts a step are accepted by force. "
            "'bytes x first' is the ratio of what steps read, if every draft pass reads the head anew",
        ],
    )


def demo(bench: Bench) -> Result:
    """Time the trained head, whose acceptance is real."""
    model = bench.workshop.model("demo")
    assert model.eagle3 is not None
    speculation = {"method": "eagle3", "model": str(model.eagle3), "num_speculative_tokens": K}
    limits = {**LIMITS, "max_batch_size": DEMO_BATCH}
    folder = bench.workshop.engine("demo-eagle3", model.folder, speculation, **limits)
    with opened(str(folder)) as engine, opened(str(folder)) as replayed:
        target = replayed.executables[0]
        recorded = {size: Recorded(target.inner) for size in (1, DEMO_BATCH)}
        target.weight_bytes = 0

        def replay(size: int) -> None:
            target.inner = recorded[size]
            recorded[size].rewind()

        one, many = model.prompts(1, INPUT_LEN), model.prompts(DEMO_BATCH, INPUT_LEN)
        contestants = [
            Contestant("batch 1", engine, one, bench.steps, K),
            Contestant("batch 1, with text", engine, one, bench.steps, K, text=True),
            Contestant(f"batch {DEMO_BATCH}", engine, many, bench.steps, K),
            *(
                Contestant(f"batch {size}, no graph", replayed, prompts, bench.steps, K, prepare=partial(replay, size))
                for size, prompts in ((1, one), (DEMO_BATCH, many))
            ),
        ]
        turns = bench.take_turns("demo", contestants)
    alone, with_text, batch, *without = (contestant.name for contestant in contestants)

    def host(name: str, of: Callable[[Turn], float] = lambda turn: turn.host) -> list[float]:
        return [1e6 * value for value in per_round(turns, name, of)]

    return Result(
        "demo",
        [
            Figure(f"step, {alone}", [1e3 * s for s in per_round(turns, alone, lambda turn: turn.step)], "ms", 0.6),
            Figure(f"host's part of a step, {alone}", host(alone), "us", 80),
            Figure(f"host's part of a step, {with_text}", host(with_text), "us"),
            Figure(f"host's part of a step, {batch}", host(batch), "us", 300),
            Figure(f"host's part of a step, {batch}, mean", host(batch, lambda turn: turn.mean_host), "us"),
            *(Figure(f"host's part of a step, {name}", host(name), "us") for name in without),
        ],
        turns,
        [
            "host: an engine core's step outside Executable.run; it is that of a step without text unless it says so. "
            "'no graph': outputs are those of the first turn, nothing is computed, so the CPU's caches stay the host's"
        ],
    )


def startup(bench: Bench) -> Result:
    """Time starts of the model's plain engine."""
    prompt = bench.model().prompts(1, INPUT_LEN)[0]
    starts = [start(bench.plain(), prompt, bench.threads, cold) for cold in (True, False, False, False)]
    cold, *warm = starts
    return Result(
        "start",
        [
            Figure("constructor to first token, warm", [one.first_token_s for one in warm], "s", 1.0),
            Figure("constructor to first token, files not in memory", [cold.first_token_s], "s"),
            Figure("constructor, warm", [one.constructor_s for one in warm], "s"),
            Figure("imports before it, warm", [one.import_s for one in warm], "s"),
            Figure("peak memory", [one.peak_rss / 1e6 for one in starts], "MB"),
            Figure(
                "peak memory beyond weights and KV pool",
                [one.overhead / 1e6 for one in starts],
                "MB",
                MEMORY_ALLOWANCE,
            ),
            Figure("memory once imported", [one.import_rss / 1e6 for one in starts], "MB"),
        ],
        notes=[
            f"start: a prompt of {len(prompt)} tokens; weights {cold.weight_bytes / 1e6:.0f} MB, KV pool "
            f"{cold.kv_bytes / 1e6:.0f} MB"
        ],
        details=[one.to_dict() for one in starts],
    )


SECTIONS: dict[str, Callable[[Bench], Result]] = {"rows": rows, "eagle3": eagle3, "demo": demo, "start": startup}


def rows_name(count: int) -> str:
    """Name of a number of rows: "1 row", "4 rows"."""
    return f"{count} row{'s' if count > 1 else ''}"


def model_vocab(model: Model) -> int:
    """Number of ids in the model's vocabulary."""
    return model.config["vocab_size"]  # type: ignore[no-any-return]


def head_engine(bench: Bench, model: Model, draft_vocab: int, quantization: str | None) -> str:
    """Return the folder of the model's engine with a head of random weights."""
    head = bench.workshop.head(model, draft_vocab)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K, "quantization": quantization}
    name = f"{model.name}-eagle3-{draft_vocab}" + (f"-{quantization}" if quantization else "")
    return str(bench.workshop.engine(name, model.folder, speculation, **LIMITS))


def huge_pages() -> str:
    """Text about this process's memory in huge pages; small pages cost up to a tenth of the bandwidth."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "this system does not say what lies in huge pages"
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines[1:]}
    return f"{sizes['AnonHugePages']:.0f} of {sizes['Rss']:.0f} MB of memory lie in huge pages, the probe's among them"


@contextmanager
def opened(folder: str, speculation: Any = None, **options: Any) -> Iterator[EngineCore]:
    """The engine of a folder, to be stepped by the caller's thread; prompts are always prefilled."""
    with LLM(folder, speculation, enable_prefix_caching=False, generation_config="off", **options) as llm:
        yield llm.engine
