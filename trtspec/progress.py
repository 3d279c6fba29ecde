"""Progress on a terminal. Import this only when there is something to show: the import takes time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trtspec.engine.stats import EngineStats


@contextmanager
def spinner(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a message on stderr. Call the yielded function with the next message."""
    with Console(stderr=True).status(message) as status:
        yield status.update


@contextmanager
def batch_bar(total: int, stats: EngineStats) -> Iterator[Callable[[], None]]:
    """Show a progress bar of `total` requests on stderr. Call the yielded function for each request that is done."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Speed(stats))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _Speed(ProgressColumn):
    """The speed and the number of steps, drawn again whenever the bar is."""

    def __init__(self, stats: EngineStats) -> None:
        super().__init__()
        self._stats = stats

    def render(self, task: Task) -> Text:
        speed = self._stats.output_tokens / self._stats.step_time if self._stats.step_time else 0.0
        return Text(f"{speed:.0f} tok/s, {self._stats.steps} steps")
