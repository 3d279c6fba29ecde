"""What a terminal shows meanwhile. Imported when there is something to show: it takes a while and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trtspec.engine.stats import EngineStats


@contextmanager
def spinner(message: str) -> Iterator[Callable[[str], None]]:
    """On stderr; call what it gives with the next message."""
    with Console(stderr=True).status(message) as status:
        yield status.update


@contextmanager
def batch_bar(total: int, stats: EngineStats) -> Iterator[Callable[[], None]]:
    """Of `total` requests, on stderr; call what it gives for each that is done."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Speed(stats))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _Speed(ProgressColumn):
    """Drawn anew whenever the bar is."""

    def __init__(self, stats: EngineStats) -> None:
        super().__init__()
        self._stats = stats

    def render(self, task: Task) -> Text:
        speed = self._stats.output_tokens / self._stats.step_time if self._stats.step_time else 0.0
        return Text(f"{speed:.0f} tok/s, {self._stats.steps} steps")
