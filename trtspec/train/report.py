"""Progress of a training stage on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import Self


class Report:
    """A progress report, used as a context manager. every: seconds between two lines; the first is printed at once."""

    def __init__(self, label: str, every: float = 10.0) -> None:
        self.label, self.every = label, every
        self._begin = self._said = -every
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(label, total=1.0, state="")

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done: float, state: str) -> None:
        """Report progress. done: fraction of the stage; 1 is always printed."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, state=state)
            return
        now = time.monotonic()
        if now - self._said >= self.every or done >= 1.0:
            self._said = now
            print(f"{self.label}: {done:.0%} after {now - self._begin:.0f} s · {state}", file=sys.stderr, flush=True)
