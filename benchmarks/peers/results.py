"""Figures from runs: medians, ratios, tables, a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.contests import Contest, Contestant

NONE = "-"  # in tables: does not apply


@dataclass
class Run:
    """One contestant in one repeat of one contest. Seconds count from the start of the generation."""

    model: str
    contest: Contest
    contestant: Contestant
    repeat: int
    seconds: float
    first_s: float  # until every request had a token
    first_tokens: int  # tokens of the requests' first steps
    request_steps: int  # after each request's first step
    outputs: list[list[int]]
    probes: tuple[float, float] = (math.nan, math.nan)  # read bandwidth right before and after, bytes per second

    @property
    def read_bandwidth(self) -> float:
        """Mean of its probes."""
        return statistics.mean(self.probes)

    @property
    def new_tokens(self) -> int:
        """Number of tokens after the first step of each request."""
        return self.contest.batch * self.contest.output_len - self.first_tokens

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens per second of a prefill, else generated tokens per second after each request's first step."""
        if self.contest.is_prefill:
            return self.contest.batch * self.contest.input_len / self.first_s
        return self.new_tokens / (self.seconds - self.first_s)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and step after the first step; NaN for a prefill."""
        return self.new_tokens / self.request_steps if self.request_steps else math.nan

    def bandwidth_share(self, weight_bytes: int) -> float:
        """Bytes of weights read per second, as a share of the probes' bandwidth. NaN except for plain decoding."""
        if self.contest.is_prefill or self.contestant.speculation is not None:
            return math.nan
        step_s = (self.seconds - self.first_s) / (self.contest.output_len - 1)
        return weight_bytes / step_s / self.read_bandwidth


@dataclass
class Start:
    """One start of one contestant.

    startup_s: seconds from the constructor to the first token of a prompt; imports and builds come before it.
    """

    model: str
    group: str
    contestant: Contestant
    startup_s: float
    weight_bytes: int  # read by a step without drafts: as stored, with scales, of an embedding one row
    peak_rss: int = 0  # bytes, over the whole group's contests

    @property
    def step_bytes(self) -> int | None:
        """weight_bytes; None with speculation, as a step then also reads what makes the drafts."""
        return self.weight_bytes if self.contestant.speculation is None else None


@dataclass(frozen=True)
class Row:
    """A contestant's figures in a contest, medians over the repeats. NaN for a figure that does not apply."""

    model: str
    contest: str
    contestant: str
    tokens_per_second: float
    trtspec_ratio: float  # speed of trtspec's compiled engine in the same format / this one's
    step_bytes: int | None  # as in Start
    bandwidth_share: float
    bandwidth_range: tuple[float, float]  # smallest and largest bandwidth_share
    tokens_per_step: float
    same_outputs: int | None  # requests with the reference's token ids; None without a reference
    requests: int


def summarise(runs: Sequence[Run], starts: Sequence[Start]) -> list[Row]:
    """A row per model, contest and contestant, with contestants in the order in which they were started."""
    rows = []
    for model, contest in dict.fromkeys((run.model, run.contest) for run in runs):
        here = [run for run in runs if (run.model, run.contest) == (model, contest)]
        for start in [start for start in starts if start.model == model]:
            contestant = start.contestant
            own = {run.repeat: run for run in here if run.contestant == contestant}
            reference = {
                run.repeat: run
                for run in here
                if run.contestant.is_reference and run.contestant.format == contestant.format
            }
            if own:
                rows.append(_row(own, reference, start))
    return rows


def _row(own: dict[int, Run], reference: dict[int, Run], start: Start) -> Row:
    """Row of a contestant. own, reference: its runs and those that it is compared with, by repeat; start: its start."""
    pairs = [(own[repeat], reference[repeat]) for repeat in sorted(own.keys() & reference.keys())]
    any_run = next(iter(own.values()))
    same = None
    if pairs:
        same = sum(a == b for a, b in zip(pairs[-1][0].outputs, pairs[-1][1].outputs, strict=True))
    shares = [run.bandwidth_share(start.weight_bytes) for run in own.values()]
    return Row(
        model=any_run.model,
        contest=any_run.contest.name,
        contestant=any_run.contestant.name,
        tokens_per_second=_median([run.tokens_per_second for run in own.values()]),
        trtspec_ratio=_median([ours.tokens_per_second / it.tokens_per_second for it, ours in pairs]),
        step_bytes=start.step_bytes,
        bandwidth_share=_median(shares),
        bandwidth_range=(min(shares), max(shares)),
        tokens_per_step=_median([run.tokens_per_step for run in own.values()]),
        same_outputs=same,
        requests=any_run.contest.batch,
    )


def rows_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of rows."""
    header = ["model", "contest", "contestant", "tokens/s", "trtspec / it", "weights/step", "of probe"]
    header += ["tokens per step", "same"]
    cells = [
        [
            row.model,
            row.contest,
            row.contestant,
            _number(row.tokens_per_second, ".1f"),
            _number(row.trtspec_ratio, ".2f", "x"),
            _megabytes(row.step_bytes),
            _share(row.bandwidth_share, row.bandwidth_range),
            _number(row.tokens_per_step, ".2f"),
            NONE if row.same_outputs is None else f"{row.same_outputs}/{row.requests}",
        ]
        for row in rows
    ]
    return header, cells


def starts_table(starts: Sequence[Start]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of starts."""
    header = ["model", "loaded for", "contestant", "constructor to first token", "peak memory", "weights/step"]
    cells = [
        [
            start.model,
            start.group,
            start.contestant.name,
            f"{start.startup_s:.2f} s",
            _megabytes(start.peak_rss or None),
            _megabytes(start.step_bytes),
        ]
        for start in starts
    ]
    return header, cells


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show(console: Console, title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table on the terminal. In the first two columns a value that repeats the one above is left out."""
    table = Table(title=title)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column < 3 else "right", no_wrap=column < 3)
    before: Sequence[str] = ["", ""]
    for line in cells:
        if line[:2] != before:
            table.add_section()
        same_model = line[0] == before[0]
        model, what = "" if same_model else line[0], "" if line[:2] == before else line[1]
        table.add_row(model, what, *line[2:])
        before = line[:2]
    console.print(table)


def as_json(runs: Sequence[Run], starts: Sequence[Start], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything except the token ids, for json; NaN becomes None."""
    return {
        "rows": [_plain(asdict(row)) for row in rows],
        "starts": [_plain(asdict(start)) for start in starts],
        "runs": [
            _plain(asdict(replace(run, outputs=[])) | {"tokens_per_second": run.tokens_per_second}) for run in runs
        ],
    }


def plot(rows: Sequence[Row], png: Path) -> None:
    """Plot tokens per second, one panel per model and contest. DependencyError without matplotlib."""
    from trtspec.plotting import new_figure, save_png

    panels = list(dict.fromkeys((row.model, row.contest) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(5.0 * columns, 2.6 * lines)
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (model, contest) in zip(places, panels, strict=False):
        shown = [row for row in rows if (row.model, row.contest) == (model, contest)]
        colors = ["tab:green" if row.contestant.startswith("trtspec") else "tab:gray" for row in shown]
        bars = axes.barh([row.contestant for row in shown], [row.tokens_per_second for row in shown], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.tick_params(labelsize="small")
        axes.set_title(f"{model}: {contest}", fontsize="small")
        axes.set_xlabel("tokens/s", fontsize="small")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    save_png(figure, png)


def _median(values: Sequence[float]) -> float:
    """Median; NaN for no values or if a value is NaN."""
    return statistics.median(values) if values and not any(map(math.isnan, values)) else math.nan


def _number(value: float, form: str, unit: str = "") -> str:
    return NONE if math.isnan(value) else f"{value:{form}}{unit}"


def _megabytes(value: int | None) -> str:
    return NONE if value is None else f"{value / 1e6:.0f} MB"


def _share(median: float, extremes: tuple[float, float]) -> str:
    return NONE if math.isnan(median) else f"{median:.0%} ({extremes[0]:.0%} .. {extremes[1]:.0%})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
