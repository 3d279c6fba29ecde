"""The benchmark's results, as JSON and as markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Steps, percentile
from benchmarks.peers.results import NONE, markdown
from benchmarks.steps.results import Figure


@dataclass(frozen=True)
class Case:
    """Steps of one kind in figures. Times are in microseconds."""

    shape: str
    mode: str
    batch: int
    step: float  # median time on the device
    floor: float  # time to move the bytes that the step must move, at the bandwidth of a copy
    wall: float  # median
    gap: float  # median idle time of the device between two steps
    gap_p95: float
    tokens_per_second: float
    steps: int
    step_bytes: float

    @classmethod
    def of(cls, shape: str, mode: str, batch: int, steps: Steps, moved: float, bandwidth: float) -> Case:
        """Return the figures of these steps. moved: bytes per step; bandwidth: bytes per second."""
        return cls(
            shape,
            mode,
            batch,
            1e6 * steps.step,
            1e6 * moved / bandwidth,
            1e6 * statistics.median(steps.walls),
            1e6 * statistics.median(steps.gaps),
            1e6 * percentile(steps.gaps, 0.95),
            steps.tokens_per_second,
            len(steps.device),
            moved,
        )

    @property
    def over_floor(self) -> float:
        return self.step / self.floor

    def cells(self) -> list[str]:
        """Cells of a row of the table CASES."""
        times = (self.step, self.floor, self.wall)
        return [
            self.shape,
            self.mode,
            str(self.batch),
            *(f"{value / 1e3:.3f} ms" for value in times[:2]),
            f"{self.over_floor:.3f}x",
            f"{self.wall / 1e3:.3f} ms",
            f"{self.gap:.1f} µs",
            f"{self.gap_p95:.1f} µs",
            f"{self.tokens_per_second:.1f}",
        ]


CASES = ["shape", "mode", "batch", "step", "floor", "step / floor", "wall", "gap", "gap p95", "tokens/s"]


@dataclass(frozen=True)
class Peer:
    """A result of transformers' generate().

    ratio: our plain tokens/s over those of transformers; None if ours was not measured.
    """

    shape: str
    batch: int
    tokens_per_second: float
    ratio: float | None

    def cells(self) -> list[str]:
        """Cells of a row of the table PEERS."""
        ratio = NONE if self.ratio is None else f"{self.ratio:.2f}x"
        return [self.shape, str(self.batch), f"{self.tokens_per_second:.1f}", ratio]


PEERS = ["shape", "batch", "transformers tokens/s", "trtspec plain / it"]


@dataclass
class Result:
    """The results of a section for one shape. error: the reason why the rest is missing."""

    section: str
    shape: str
    figures: list[Figure] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The result as a dict for json."""
        figures = [
            {
                "name": figure.name,
                "unit": figure.unit,
                "median": figure.median,
                "values": [float(f"{value:.4g}") for value in figure.values],
                "limit": figure.limit,
                "met": figure.met,
            }
            for figure in self.figures
        ]
        cases = [{**asdict(case), "over_floor": case.over_floor} for case in self.cases]
        return {**asdict(self), "figures": figures, "cases": cases}


NOTES = (
    "step: median time on the device from a launch's first copy to its last, by CUDA events around each. Weights are "
    "random; accepted drafts are counted as accepted by force.",
    "floor: bytes that a step must move over the bandwidth of a large copy on the device, bytes read and written both "
    "counted: weights (of an EAGLE3 head once a draft pass), the KV cache of all tokens read and that of the step's "
    "written. Activations and logits are not in it.",
    "gap: on the device between a launch's end and the next one's begin. What the device waits for the host once a "
    "launch has begun is in `step`. wall: the host's time for a step, median; tokens/s: of all steps timed.",
    "no overlap: the host waits for a step before it prepares the next (disable_overlap_scheduler).",
    "rows and sampling: what is compared takes turns, a figure has one value a turn; the device is kept busy until the "
    "host has queued the whole launch, so gap, wall and tokens/s of these say nothing and are left out.",
    "transformers: generate() of the same folder in the same process, greedy, bf16; tokens after the first over the "
    "time that they take.",
)


def report_markdown(about: Mapping[str, str], results: Sequence[Result]) -> str:
    """The report: first the targets, then all cases, transformers, failures and notes."""
    lines = [f"# {about['card']}, {about['date']}\n"]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    figures = [[r.shape, r.section, *figure.cells()] for r in results for figure in r.figures]
    tables = [
        (["shape", "section", "figure", "median", "range", "target", "met"], figures),
        (CASES, [case.cells() for result in results for case in result.cases]),
        (PEERS, [peer.cells() for result in results for peer in result.peers]),
    ]
    lines += ["\n" + markdown(header, cells).rstrip() for header, cells in tables if cells]
    failed = [f"- {r.section}, {r.shape}: {r.error}" for r in results if r.error is not None]
    if failed:
        lines += ["\nFAILED, so figures are missing:\n", *failed]
    return "\n".join([*lines, "", *(f"- {note}" for note in NOTES)]) + "\n"


def write(folder: Path, about: Mapping[str, str], bandwidth: float, results: Sequence[Result]) -> tuple[Path, Path]:
    """Write the JSON and the markdown file, and replace those of the same date."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{about['date']}.json"
    data = {**about, "copy_bandwidth": bandwidth, "results": [result.to_dict() for result in results]}
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    report = file.with_suffix(".md")
    report.write_text(report_markdown(about, results), encoding="utf-8")
    return file, report
