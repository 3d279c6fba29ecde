"""The sections: the steps that are timed for one shape, and the limits that their figures must meet."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.card import Card
from benchmarks.gpu.checkpoints import SHAPES, checkpoint, head
from benchmarks.gpu.kernels import measure_attention, measure_linears
from benchmarks.gpu.peer import Transformers
from benchmarks.gpu.results import Case, Peer, Result
from benchmarks.gpu.steps import GREEDY, Opened, Steps, random_prompts, step_bytes
from benchmarks.steps.results import Figure
from benchmarks.steps.sections import Guesses
from trtspec import SamplingParams

K = 3
OVER_FLOOR = 1.2  # at most, of a generation step at batch 1
GAP = 20.0  # µs
FOUR_ROWS = 1.08  # times a step of one row
SAMPLING = 100.0  # µs
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=None, ignore_eos=True, detokenize=False)
SAMPLED_BATCH = 8
ROWS_BATCHES = (1, 8)
_PEER_TOKENS = 48

Report = Callable[[str], None]


@dataclass
class Bench:
    """The state that all sections share. One engine is open at a time.

    bandwidth: that of a copy, bytes per second; steps: number that is timed for each case; turns: number of turns when
    modes are compared.
    """

    card: Card
    work: Path
    bandwidth: float
    batches: Sequence[int]
    steps: int
    turns: int
    static_cache: bool
    report: Report
    plain_speeds: dict[tuple[str, int], float] = field(default_factory=dict)  # (shape, batch) -> tokens/s
    _opened: tuple[tuple[str, str], Opened] | None = None

    def engine(self, shape: str, mode: str, speculation: dict[str, Any] | None = None) -> Opened:
        """Return an engine for this shape and mode: the open one if it has both, else a new one."""
        if self._opened is None or self._opened[0] != (shape, mode):
            self.close()
            folder = self.checkpoint(shape)
            self.report(f"{shape}: starting an engine, {mode}")
            opened = Opened(folder, speculation, max(*self.batches, SAMPLED_BATCH, *ROWS_BATCHES), self.card)
            self._opened = (shape, mode), opened
        return self._opened[1]

    def close(self) -> None:
        """Close the open engine, if there is one."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

    def checkpoint(self, shape: str) -> Path:
        """Return the folder of the model's checkpoint."""
        return checkpoint(shape, self.work, self.card.device, self.report)

    def head(self, shape: str) -> Path:
        """Return the folder of the EAGLE3 head's checkpoint."""
        return head(shape, self.work, self.card.device, self.report)

    def time(
        self, opened: Opened, shape: str, batch: int, draft_len: int = 0, params: SamplingParams = GREEDY
    ) -> Steps:
        """Time steps of `batch` requests."""
        return opened.steps(random_prompts(SHAPES[shape], batch), params, draft_len, self.steps)

    def case(self, shape: str, mode: str, batch: int, opened: Opened, steps: Steps, draft_len: int = 0) -> Case:
        """Return the steps' figures; the launch makes as many drafts as it verifies."""
        moved = step_bytes(opened.weight_bytes, SHAPES[shape], batch, steps.context, draft_len + 1, draft_len)
        case = Case.of(shape, mode, batch, steps, moved, self.bandwidth)
        self.report(" | ".join(case.cells()))
        return case


def gap_figure(batch: int, steps: Sequence[Steps], limit: float | None = GAP, name: str = "gap") -> Figure:
    """Figure of the time between launches."""
    return Figure(f"{name}, batch {batch}", [1e6 * gap for one in steps for gap in one.gaps], "us", limit)


def floor_figure(batch: int, cases: Sequence[Case], steps: Sequence[Steps]) -> Figure:
    """Figure of the steps' times, each over the floor of its case."""
    ratios = [1e6 * one / case.floor for case, timed in zip(cases, steps, strict=True) for one in timed.device]
    return Figure(f"step / floor, batch {batch}", ratios, "x", OVER_FLOOR if batch == 1 else None)


def plain(bench: Bench, result: Result) -> None:
    """Time steps without speculation; at batch 1 also without overlap."""
    shape = result.shape
    opened = bench.engine(shape, "plain")
    for batch in bench.batches:
        steps = bench.time(opened, shape, batch)
        case = bench.case(shape, "plain", batch, opened, steps)
        bench.plain_speeds[shape, batch] = case.tokens_per_second
        result.cases.append(case)
        result.figures += [floor_figure(batch, [case], [steps]), gap_figure(batch, [steps])]
    if 1 in bench.batches:
        opened.overlap(False)
        alone = bench.time(opened, shape, 1)
        opened.overlap(True)
        result.cases.append(bench.case(shape, "plain, no overlap", 1, opened, alone))
        result.figures.append(gap_figure(1, [alone], None, "gap without overlap"))


def sampling(bench: Bench, result: Result) -> None:
    """Time what top-k and top-p add to a plain step."""
    shape = result.shape
    opened = bench.engine(shape, "plain")
    opened.queue.holds = True
    added = []
    try:
        for _ in range(bench.turns):
            greedy, sampled = (
                bench.time(opened, shape, SAMPLED_BATCH, params=params).step for params in (GREEDY, SAMPLED)
            )
            added.append(1e6 * (sampled - greedy))
    finally:
        opened.queue.holds = False
    name = f"added by temperature, top-k {SAMPLED.top_k} and top-p {SAMPLED.top_p}, batch {SAMPLED_BATCH}"
    result.figures.append(Figure(name, added, "us", SAMPLING))


def eagle3(bench: Bench, result: Result) -> None:
    """Time steps with a head inside the launch, whose drafts are accepted by force."""
    shape = result.shape
    speculation = {"method": "eagle3", "model": str(bench.head(shape)), "num_speculative_tokens": K}
    opened = bench.engine(shape, f"EAGLE3 K={K}", speculation)
    for batch in bench.batches:
        cases, timed = [], []
        for accepted in range(K + 1):
            opened.force(accepted)
            steps = bench.time(opened, shape, batch, K)
            if steps.tokens != bench.steps * batch * (accepted + 1):
                raise RuntimeError(f"{steps.tokens} tokens with {accepted} accepted drafts, batch {batch}")
            timed.append(steps)
            cases.append(bench.case(shape, f"EAGLE3 K={K}, {accepted} accepted", batch, opened, steps, K))
        result.cases += cases
        result.figures += [floor_figure(batch, cases, timed), gap_figure(batch, timed)]


def rows(bench: Bench, result: Result) -> None:
    """Time the target alone, when it verifies K drafts of each request and when it verifies none."""
    shape = result.shape
    drafter = Guesses(SHAPES[shape].vocab)
    speculation = {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": K}
    opened = bench.engine(shape, "drafts from the host", speculation)
    opened.queue.holds = True
    for batch in ROWS_BATCHES:
        ratios = []
        for _ in range(bench.turns):
            times = []
            for draft_len in (0, K):
                drafter.use(draft_len)
                times.append(bench.time(opened, shape, batch, draft_len).step)
            ratios.append(times[1] / times[0])
        name = f"step of {K + 1} rows a request / of 1 row, batch {batch}"
        result.figures.append(Figure(name, ratios, "x", FOUR_ROWS))


def transformers(bench: Bench, result: Result) -> None:
    """Time transformers, for comparison with the plain engine, which is closed first."""
    shape = result.shape
    bench.close()
    folder = bench.checkpoint(shape)
    bench.report(f"{shape}: loading transformers")
    peer = Transformers(folder, bench.card, bench.static_cache)
    try:
        for batch in bench.batches:
            speed = peer.tokens_per_second(random_prompts(SHAPES[shape], batch), min(_PEER_TOKENS, bench.steps))
            ours = bench.plain_speeds.get((shape, batch))
            result.peers.append(Peer(shape, batch, speed, None if ours is None else ours / speed))
            bench.report(" | ".join(result.peers[-1].cells()))
    finally:
        del peer
        gc.collect()
        bench.card.release()


def linears(bench: Bench, result: Result) -> None:
    """Time the linears of a layer in every format, next to torch's in bf16."""
    bench.close()
    result.figures += measure_linears(bench.card, SHAPES[result.shape], bench.bandwidth, bench.turns, bench.report)


def attention(bench: Bench, result: Result) -> None:
    """Time attention of generations and of prompts, next to torch's."""
    bench.close()
    result.figures += measure_attention(bench.card, SHAPES[result.shape], bench.bandwidth, bench.turns, bench.report)


SECTIONS: dict[str, Callable[[Bench, Result], None]] = {
    "plain": plain,
    "sampling": sampling,
    "eagle3": eagle3,
    "rows": rows,
    "transformers": transformers,
    "linears": linears,
    "attention": attention,
}
