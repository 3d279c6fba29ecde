"""Rows of several requests, in launches of limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Piece = tuple[int, int, int]
"""(request, start, end): its rows [start, end)."""


def pack_rows(starts: Sequence[int], ends: Sequence[int], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Rows [start, end) of every request, in order, in launches of up to `max_num_tokens` rows."""
    pieces, room = [], max_num_tokens
    for b, (start, last) in enumerate(zip(starts, ends, strict=True)):
        while start < last:
            end = min(last, start + room)
            pieces.append((b, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield pieces
                pieces, room = [], max_num_tokens
    if pieces:
        yield pieces
