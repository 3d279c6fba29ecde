"""Packs rows of several requests into launches of limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Piece = tuple[int, int, int]
"""(request, start, end): rows [start, end) of one request."""


def pack_rows(starts: Sequence[int], ends: Sequence[int], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Yield launches of at most `max_num_tokens` rows, which cover rows [start, end) of every request in order."""
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
