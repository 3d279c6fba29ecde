"""Keeps the target's hidden states of requests' rows, from the steps that computed them on."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch


class RowStates:
    """Hidden states by request and position. Rejected rows are kept too, until they are computed again.

    States stay on the device that computed them until the next step of their request. If they were not used by then,
    they are moved to host memory. So a GPU holds the states of one step, however long there is no drafting.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[tuple[int, Tensor]]] = {}  # request id -> (first row, states), in order

    def collect(self, batch: Batch, states: Tensor, path: Tensor | None = None) -> None:
        """Store the states [T, width] of a step's packed rows. Call this before the step is committed.

        path: [B, K+1], the rows that a draft tree accepts of each request (core.Verdict); None = rows are in line. Only
        the states of these rows are kept, in their order.
        """
        lines = [None] * len(batch) if path is None else path.tolist()
        parts = torch.split(states, [row.num_rows for row in batch])
        for row, part, line in zip(batch, parts, lines, strict=True):
            start, chunks = row.request.kv.committed, self._chunks.setdefault(row.request.request_id, [])
            while chunks and chunks[-1][0] >= start:
                chunks.pop()
            if chunks:
                first, before = chunks[-1]
                chunks[-1] = first, before.cpu()
            if line is not None and not row.is_context:
                part = part[torch.tensor([one for one in line if one >= 0], device=part.device)]
            chunks.append((start, part.clone()))

    def rows(self, request: Request, start: int, end: int) -> Tensor | None:
        """States of rows [start, end), [end - start, width], on the device of the last row; None if one is missing."""
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

    def begins_after(self, request: Request, row: int) -> bool:
        """Whether states of the request are kept, but none of this row."""
        chunks = self._chunks.get(request.request_id)
        return chunks is not None and len(chunks) > 0 and chunks[0][0] > row

    def drop(self, request: Request, before: int) -> None:
        """Drop the chunks that have no row from `before` on, apart from rows that were rejected."""
        chunks = self._chunks.get(request.request_id, [])
        while len(chunks) > 1 and chunks[1][0] <= before:
            chunks.pop(0)
        if chunks and min(chunks[0][0] + len(chunks[0][1]), request.kv.committed) <= before:
            chunks.pop(0)

    def forget(self, request: Request) -> None:
        """Drop the states of a request that has ended, or whose rows no drafter will read."""
        self._chunks.pop(request.request_id, None)
