"""StepCosts: how long a step takes, by the drafts that it verifies and makes. Measured before requests are served."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

from trtspec.errors import CheckpointError


@dataclass(frozen=True)
class Cell:
    """A measured kind of step.

    made: drafts that are made for each request, in the launch or after it. batch: requests. verified: drafts that the
    step verifies of each request. seconds: time of a step, drafting included.
    """

    made: int
    batch: int
    verified: int
    seconds: float


class StepCosts:
    """Seconds of a step, on straight lines between the cells.

    More drafts, verified or made, and more requests never take less time here. Where cells say so, the larger time was
    disturbed, and is lowered. Past the largest batch that was measured, time grows in proportion to the batch.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = tuple(cells)
        self.draft_lens = tuple(sorted({cell.made for cell in cells}))
        self.batch_sizes = tuple(sorted({cell.batch for cell in cells}))
        self._points: dict[int, dict[int, _Line]] = {}
        more: dict[int, _Line] = {}
        for made in reversed(self.draft_lens):
            self._points[made] = more = _lines([cell for cell in cells if cell.made == made], more)
        self._curves: dict[tuple[int, int, int], list[float]] = {}

    def curve(self, made: int, batch: int, longest: int) -> list[float]:
        """Seconds of a step that makes `made` drafts for each of `batch` requests, [batch * longest + 1].

        Entry n is for a step that verifies n drafts in all.
        """
        key = (made, batch, longest)
        if key not in self._curves:
            points, sizes = self._points[made], self.batch_sizes
            high = self.size_for(batch)
            low = sizes[max(sizes.index(high) - 1, 0)] if high > batch else high
            part = (batch - low) / (high - low) if high > low else 0.0
            scale = max(batch / high, 1.0)
            curve = []
            for drafts in range(batch * longest + 1):
                below, above = (_between(points[size], drafts / batch) for size in (low, high))
                curve.append((below + (above - below) * part) * scale)
            self._curves[key] = curve
        return self._curves[key]

    def size_for(self, batch: int) -> int:
        """The smallest batch that was measured and is not smaller than this one, else the largest."""
        sizes = self.batch_sizes
        return sizes[min(bisect.bisect_left(sizes, batch), len(sizes) - 1)]

    def observe(self, made: int, batch: int, longest: int, verified: int, seconds: float) -> bool:
        """Note how long a step took; return whether that changed the costs. These costs never change."""
        return False

    def tries(self, batch: int) -> bool | None:
        """Kind of step to be tried for its time alone. These costs ask for none."""
        return None

    def count_try(self, batch: int) -> None:
        """Count a launch of the kind that `tries` names."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the cells as plain data."""
        return [asdict(cell) for cell in self.cells]

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the costs that to_json turned into `data`. CheckpointError if `data` holds none."""
        try:
            if not isinstance(data, list) or not data:
                raise TypeError("no list of cells")
            cells = [Cell(**cell) for cell in data]
            makes, sizes = {cell.made for cell in cells}, {cell.batch for cell in cells}
            if not all(cell.seconds > 0 and cell.batch > 0 and cell.made >= 0 <= cell.verified for cell in cells):
                raise ValueError("a cell that no step can have")
            if len({(cell.made, cell.batch) for cell in cells}) != len(makes) * len(sizes):
                raise ValueError("a batch size that was not measured with every number of drafts")
            return cls(cells)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"step times are damaged ({error}); remove them, and they are measured again"
            ) from error


_Line = list[tuple[int, float]]
"""(drafts verified of each request, seconds), ascending."""


def _lines(cells: Sequence[Cell], more: dict[int, _Line]) -> dict[int, _Line]:
    """The line of each batch, through its cells and not above the line of a larger batch.

    more: the lines of steps that make more drafts. No line begins above theirs.
    """
    lines: dict[int, _Line] = {}
    larger: _Line = []
    for batch in sorted({cell.batch for cell in cells}, reverse=True):
        line: _Line = []
        for cell in sorted((cell for cell in cells if cell.batch == batch), key=lambda cell: -cell.verified):
            bounds = [cell.seconds]
            bounds += [line[0][1]] if line else []
            bounds += [_between(larger, cell.verified)] if larger else []
            bounds += [more[batch][0][1]] if batch in more and cell.verified == 0 else []
            line.insert(0, (cell.verified, min(bounds)))
        lines[batch] = larger = line
    return lines


def _between(line: _Line, x: float) -> float:
    """Value at x; past the ends, on the line through the two points there, but not below the last value."""
    if len(line) == 1:
        return line[0][1]
    at = min(max(bisect.bisect_left(line, (x,)), 1), len(line) - 1)
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
