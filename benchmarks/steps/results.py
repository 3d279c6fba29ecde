"""Figures from turns: ratios within rounds, medians, targets, tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.results import markdown
from benchmarks.steps.rounds import Turn

FORMS = {"x": "{:.3f}x", "share": "{:.3f}", "ms": "{:.3f} ms", "us": "{:.0f} µs", "s": "{:.2f} s", "MB": "{:.0f} MB"}


@dataclass(frozen=True)
class Figure:
    """A number with one value per round (or start), in `unit`, one of FORMS.

    limit: target of the median, at most or (at_least) at least; None: the figure is only reported.
    """

    name: str
    values: list[float]
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median meets the limit; None without a limit."""
        if self.limit is None:
            return None
        return self.median >= self.limit if self.at_least else self.median <= self.limit

    def cells(self) -> list[str]:
        """Cells of a table: name, median, range, target, met."""
        show = FORMS[self.unit].format
        target = "" if self.limit is None else f"{'≥' if self.at_least else '≤'} {show(self.limit)}"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        return [self.name, show(self.median), f"{show(min(self.values))} .. {show(max(self.values))}", target, met]


@dataclass
class Result:
    """The result of a section."""

    section: str
    figures: list[Figure]
    turns: list[Turn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)  # for the JSON file


def per_round(turns: Sequence[Turn], contestant: str, value: Callable[[Turn], float]) -> list[float]:
    """A value of each of a contestant's turns, in the order of the rounds."""
    own = {turn.round: value(turn) for turn in turns if turn.contestant == contestant}
    return [own[number] for number in sorted(own)]


def ratios(
    turns: Sequence[Turn], contestant: str, to: str, value: Callable[[Turn], float] = lambda turn: turn.step
) -> list[float]:
    """A contestant's value over another's, round by round; the default value is the step time."""
    pairs = zip(per_round(turns, contestant, value), per_round(turns, to, value), strict=True)
    return [own / other for own, other in pairs]


def turns_table(turns: Sequence[Turn]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: each contestant's medians over the rounds, and the step's ratio to the first contestant's."""
    header = ["contestant", "step", "x first", "bytes x first", "tokens/s", "host", "weights/step", "GB/s", "of probe"]
    names = list(dict.fromkeys(turn.contestant for turn in turns))
    cells = []
    for name in names:

        def median(value: Callable[[Turn], float], name: str = name) -> float:
            return statistics.median(per_round(turns, name, value))

        cells.append(
            [
                name,
                f"{median(lambda turn: turn.step) * 1e3:.3f} ms",
                f"{statistics.median(ratios(turns, name, names[0])):.3f}",
                f"{statistics.median(ratios(turns, name, names[0], lambda turn: turn.weight_bytes)):.3f}",
                f"{median(lambda turn: turn.tokens_per_second):.1f}",
                f"{median(lambda turn: turn.host) * 1e6:.0f} µs",
                f"{median(lambda turn: turn.weight_bytes) / 1e6:.1f} MB",
                f"{median(lambda turn: turn.weight_bytes / turn.step) / 1e9:.1f}",
                f"{median(lambda turn: turn.bandwidth_share):.3f}",
            ]
        )
    return header, cells


def report_markdown(results: Sequence[Result], about: Sequence[str]) -> str:
    """The report: all figures next to their targets, then the contestants, the lines `about` and all notes."""
    header = ["section", "figure", "median", "range", "target", "met"]
    cells = [[result.section, *figure.cells()] for result in results for figure in result.figures]
    parts = [markdown(header, cells)]
    for result in results:
        if result.turns:
            parts.append(f"{result.section}:\n\n" + markdown(*turns_table(result.turns)))
    parts += ["\n".join(f"- {line}" for line in (*about, *(note for result in results for note in result.notes)))]
    return "\n".join(parts)


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Figures with all their values, and the medians of each turn (seconds, bytes, bytes per second)."""
    return [
        {
            "section": result.section,
            "figures": [
                {
                    "name": figure.name,
                    "unit": figure.unit,
                    "median": figure.median,
                    "values": figure.values,
                    "limit": figure.limit,
                    "at_least": figure.at_least,
                    "met": figure.met,
                }
                for figure in result.figures
            ],
            "turns": [
                {
                    "contestant": turn.contestant,
                    "round": turn.round,
                    "step_s": turn.step,
                    "host_s": turn.host,
                    "tokens_per_second": turn.tokens_per_second,
                    "weight_bytes": turn.weight_bytes,
                    "read_bandwidth": turn.read_bandwidth,
                    "bandwidth_share": turn.bandwidth_share,
                }
                for turn in result.turns
            ],
            "notes": result.notes,
            "details": result.details,
        }
        for result in results
    ]
