"""From a batch of requests to the tensors of one launch.

While the same requests run with as many rows and drafts each, a step's tensors have the same shapes, and most of them
the same contents: those are made once per `_Layout`. What changes is written into the preallocated buffers of two
`_Frame`s that take turns, so that a step in flight keeps its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch.autograd.graph import increment_version

from trtspec.core import AttnMetadata, Carry, SamplingTensors, SpecMetadata, StepInputs
from trtspec.engine.edits import logit_edits
from trtspec.engine.scheduler import Batch
from trtspec.modes import SpeculativeDecodingMode


@dataclass(frozen=True)
class _Layout:
    """What follows from who is in a batch, with how many rows and drafts each. Frames share its tensors: nobody writes
    them."""

    batch: Batch
    cu_q_lens: torch.Tensor  # [B+1] int32
    spec: SpecMetadata  # draft_tokens, next_prompt_token and sampling.positions are for the frames to make
    owners: np.ndarray  # [R] whose each logits row is
    back: np.ndarray  # [R] the token it draws, counted from its owner's kv_len: <= 0
    draft_rows: np.ndarray  # [G, K] packed row of each draft; the last again past the draft_len


class _Frame:
    """The inputs of one step, and the arrays that are the memory of those tensors that change from step to step."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        B, spec = len(layout.batch), layout.spec
        self.input_ids = np.empty(layout.cu_q_lens.numpy()[-1], dtype=np.int64)
        self.kv_lens = np.empty(B, dtype=np.int32)
        self.draft_tokens = np.empty(layout.draft_rows.shape, dtype=np.int64)
        self.positions = np.empty(spec.gather_ids.shape[0], dtype=np.int64)
        self.next_prompt_token = np.full(B, -1, dtype=np.int64)
        self.tables = np.empty((B, 0), dtype=np.int32)
        tensor = torch.from_numpy
        attn = AttnMetadata(layout.cu_q_lens, tensor(self.kv_lens), tensor(self.tables), _NO_TREE)
        spec = replace(
            spec,
            draft_tokens=tensor(self.draft_tokens),
            next_prompt_token=tensor(self.next_prompt_token),
            sampling=replace(spec.sampling, positions=tensor(self.positions)),
        )
        self.inputs = StepInputs(tensor(self.input_ids), attn, spec)
        written = (self.input_ids, self.positions, self.kv_lens, self.draft_tokens)
        self.memory = [one.data.cast("B") for one in written if one.size]  # for go_on
        self.has_version = not attn.kv_lens.is_inference()
        self.blocks: list[list[int]] = [[]] * B  # the list in each row of tables, ...
        self.num_blocks = [0] * B  # ... and how much of it is there
        self.stale = True  # tables may not be what the requests have, and go_on is to look, or ...
        self.grown: list[tuple[int, int, int]] = []  # ... only these are missing: row, column, block

    def fill(self, batch: Batch) -> StepInputs:
        """The batch's tokens, lengths and blocks as they are now."""
        ids: list[int] = []
        ends: list[int] = []
        for b, (request, num_rows, _, is_context) in enumerate(batch):
            kv, tokens, start = request.kv, request.tokens, request.reach
            end = start + num_rows
            ends.append(end)
            if is_context:
                ids += tokens[start:end]
                self.next_prompt_token[b] = tokens[end] if end < len(tokens) else -1
            elif request.is_ahead:
                ids += [0] * num_rows  # the step in flight knows them, see carry()
            else:
                ids.append(tokens[-1])
                ids += request.drafts
            if kv.blocks is not self.blocks[b] or len(kv.blocks) != self.num_blocks[b]:
                self._write_table(b, kv.blocks)
        self.stale = False
        self.input_ids[:] = ids
        self.kv_lens[:] = ends
        self.input_ids.take(self.layout.draft_rows, out=self.draft_tokens)
        np.add(self.kv_lens[self.layout.owners], self.layout.back, out=self.positions)
        return self._changed()

    def go_on(self, ids: list[int], ends: list[int]) -> StepInputs:
        """ids [B * (K+1)] and ends [B] of the same batch of generations, whose requests are not looked at. After a
        launch that has swept the CPU's caches every new object costs, and an array function more to fetch than to run:
        there are few of both."""
        if self.stale:
            for b, row in enumerate(self.layout.batch):
                self._write_table(b, row.request.kv.blocks)
            self.stale = False
        else:
            for b, place, block in self.grown:
                self._add_block(b, place, block)
        self.grown.clear()
        width = len(ids) // len(ends)
        rows = map(range, [end - width + 1 for end in ends], [end + 1 for end in ends])
        values = [array("q", ids), array("q", list(chain.from_iterable(rows))), array("i", ends)]
        if width > 1:
            drafts = ids.copy()
            del drafts[::width]
            values.append(array("q", drafts))
        for memory, new in zip(self.memory, values, strict=True):
            memory[:] = memoryview(new).cast("B")
        return self._changed()

    def _changed(self) -> StepInputs:
        """By way of numpy, which torch does not see: who keeps what follows from lengths or tables must know."""
        if self.has_version:
            increment_version(self.inputs.attn.kv_lens)
        return self.inputs

    def _add_block(self, b: int, place: int, block: int) -> None:
        """Write a row's new block to column `place`."""
        if place < self.tables.shape[1]:
            self.tables[b, place] = block
            self.num_blocks[b] = place + 1
        else:
            self._write_table(b, self.blocks[b])

    def _write_table(self, b: int, blocks: list[int]) -> None:
        """Bring a row of the block tables up to date; there are always some columns of scratch to grow into."""
        if len(blocks) > self.tables.shape[1]:
            wider = np.zeros((len(self.tables), len(blocks) + _SPARE_COLUMNS), dtype=np.int32)
            wider[:, : self.tables.shape[1]] = self.tables
            self.tables = wider
            attn = replace(self.inputs.attn, block_tables=torch.from_numpy(wider))
            self.inputs = replace(self.inputs, attn=attn)
        known = self.num_blocks[b] if blocks is self.blocks[b] else 0
        self.tables[b, known : len(blocks)] = blocks[known:]
        if known == 0:
            self.tables[b, len(blocks) :] = 0
        self.blocks[b], self.num_blocks[b] = blocks, len(blocks)


class BatchAssembler:
    """`forced_accept`: drafts counted as accepted in any case, -1 = off. `graph_draft_lens`: K of the compiled graphs
    in rising order; a step's K is rounded up to one of them; empty = any K will do."""

    def __init__(
        self,
        mode: SpeculativeDecodingMode,
        max_draft_len: int,
        forced_accept: int,
        graph_draft_lens: Sequence[int] = (),
    ) -> None:
        self.mode = mode
        self.max_draft_len = max_draft_len
        self.forced_accept = forced_accept
        self.graph_draft_lens = graph_draft_lens
        self._layout: _Layout | None = None
        self._frames: tuple[_Frame | None, _Frame | None] = (None, None)  # that of the last step is the second

    def __call__(self, batch: Batch, next_draft_len: int = 0) -> StepInputs:
        """Pack the rows. T rows in request order; see core.SpecMetadata for the logits rows and next_draft_len.

        The tensors are this step's until the step after the next is packed.
        """
        layout = self._layout
        if layout is None or layout.batch != batch or layout.spec.next_draft_len != next_draft_len:
            layout = self._layout = self._make_layout(batch, next_draft_len)
        inputs = self._next_frame(layout).fill(batch)
        edits = logit_edits(batch, layout.spec.runtime_draft_len)
        return inputs if edits is None else replace(inputs, spec=replace(inputs.spec, edits=edits))

    def carry(self, batch: Batch, last: Batch) -> Carry:
        """What the batch takes from the outputs of `last`, which is in flight."""
        places = {id(row.request): b for b, row in enumerate(last)}
        tokens: list[int] = []
        kept = []
        for request, num_rows, _, _ in batch:
            place = places[id(request)] if request.is_ahead else -1
            kept.append(place)
            start = place * (self.max_draft_len + 1)
            tokens += range(start, start + num_rows) if request.is_ahead else [-1] * num_rows
        return Carry(torch.tensor(tokens), torch.tensor(kept))

    def go_on(self, ids: list[int], ends: list[int]) -> StepInputs:
        """The last batch again, all generations, with the same layout: ids [B * (K+1)] of tokens to read in, ends [B]
        the length of each sequence with them. What becomes of their blocks is told beforehand: look_again, add_blocks.
        """
        assert self._layout is not None
        return self._next_frame(self._layout).go_on(ids, ends)

    def look_again(self) -> None:
        """Requests of the last batch may have other blocks than in its steps so far: go_on is to look at them once."""
        assert self._layout is not None
        self._frames = (self._frame(self._frames[0], self._layout), self._frame(self._frames[1], self._layout))
        for frame in self._frames:
            frame.stale = True

    def add_blocks(self, b: int, start: int, blocks: list[int]) -> None:
        """For go_on: row b of the last batch has these blocks more, from column `start` of its table."""
        for frame in self._frames:
            assert frame is not None
            frame.grown += [(b, start + i, block) for i, block in enumerate(blocks)]

    def _next_frame(self, layout: _Layout) -> _Frame:
        """The frame of the step before the last; from now on that of the last."""
        frame = self._frame(self._frames[0], layout)
        self._frames = self._frames[1], frame
        return frame

    def _frame(self, frame: _Frame | None, layout: _Layout) -> _Frame:
        return frame if frame is not None and frame.layout is layout else _Frame(layout)

    def _make_layout(self, batch: Batch, next_draft_len: int) -> _Layout:
        B, C = len(batch), sum([row.is_context for row in batch])
        num_rows = np.array([row.num_rows for row in batch], dtype=np.int32)
        draft_lens = np.array([row.draft_len for row in batch], dtype=np.int32)
        K = int(draft_lens.max())
        K = next((length for length in self.graph_draft_lens if length >= max(K, next_draft_len)), K)
        cu_q_lens = np.zeros(B + 1, dtype=np.int32)
        np.cumsum(num_rows, out=cu_q_lens[1:])
        # logits rows: one of each context, K + 1 of each generation, of which those past its drafts repeat its last
        owners = np.concatenate((np.arange(C), np.repeat(np.arange(C, B), K + 1)))
        back = np.minimum(np.arange(K + 1) - draft_lens[C:, None], 0).reshape(-1)
        back = np.concatenate((np.zeros(C, dtype=np.int64), back))
        gather_ids = cu_q_lens[owners + 1] - 1 + back
        forced = np.where(np.arange(B) < C, -1, self.forced_accept).astype(np.int32)
        spec = SpecMetadata(
            spec_dec_mode=self.mode,
            max_draft_len=self.max_draft_len,
            request_ids=tuple([row.request.request_id for row in batch]),
            seq_lens=torch.from_numpy(num_rows),
            gather_ids=torch.from_numpy(gather_ids),
            draft_tokens=torch.empty(B - C, K, dtype=torch.int64),
            draft_lens=torch.from_numpy(draft_lens),
            next_prompt_token=torch.empty(0, dtype=torch.int64),
            forced_accept=torch.from_numpy(forced),
            sampling=SamplingTensors.of([row.request.sampling for row in batch], back, owners),
            next_draft_len=next_draft_len,
        )
        draft_rows = gather_ids[C:].reshape(B - C, K + 1)[:, 1:].copy()
        return _Layout(batch, torch.from_numpy(cu_q_lens), spec, owners, back, draft_rows)


_SPARE_COLUMNS = 16  # of a block table that must grow, so that it does not do so every few steps
_NO_TREE = torch.empty(0, dtype=torch.int32)
