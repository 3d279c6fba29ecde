"""Hidden states of the target, kept of requests' rows from the steps that computed them on."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch


class RowStates:
    """By request and place. Rows may be of steps that were rejected; they are replaced when they are computed again.

    States stay on the device that they come from until the next step of their request, and are moved to the host's
    memory if they were not asked for by then: a GPU holds those of one step, however long nobody drafts.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[tuple[int, Tensor]]] = {}  # request id -> (first row, states), in order

    def collect(self, batch: Batch, states: Tensor) -> None:
        """Before a step is committed: states [T, width] of its packed rows."""
        parts = torch.split(states, [row.num_rows for row in batch])
        for row, part in zip(batch, parts, strict=True):
            start, chunks = row.request.kv.committed, self._chunks.setdefault(row.request.request_id, [])
            while chunks and chunks[-1][0] >= start:
                chunks.pop()
            if chunks:
                first, before = chunks[-1]
                chunks[-1] = first, before.cpu()
            chunks.append((start, part.clone()))

    def rows(self, request: Request, start: int, end: int) -> Tensor | None:
        """Rows [start, end) of a request, [end - start, width], where the last of them are; None if one is missing."""
        chunks = self._chunks.get(request.request_id)
        if not chunks:
            return None
        ends = [*(first for first, _ in chunks[1:]), end]
        parts = [
            part[max(start - first, 0) : min(last, end) - first]
            for (first, part), last in zip(chunks, ends, strict=True)
            if first < end and last > start
        ]
        states = torch.cat([part.to(parts[-1].device) for part in parts]) if parts else None
        return states if states is not None and len(states) == end - start else None

    def drop(self, request: Request, before: int) -> None:
        """Forget chunks that have no row from `before` on, but for rows that were rejected."""
        chunks = self._chunks.get(request.request_id, [])
        while len(chunks) > 1 and chunks[1][0] <= before:
            chunks.pop(0)
        if chunks and min(chunks[0][0] + len(chunks[0][1]), request.kv.committed) <= before:
            chunks.pop(0)

    def forget(self, request: Request) -> None:
        """The request has ended, or its rows will not be asked for."""
        self._chunks.pop(request.request_id, None)
