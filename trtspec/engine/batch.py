"""From a batch of requests to the tensors of one launch.

While the same requests run with as many rows and drafts each, a step's tensors have the same shapes, and most of them
the same contents: those are made once per `_Layout`. What changes is written into the preallocated buffers of two
`_Frame`s that take turns, so that a step in flight keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.autograd.graph import increment_version

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
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
        self.blocks: list[list[int]] = [[]] * B  # the list in each row of tables, ...
        self.num_blocks = [0] * B  # ... and how much of it is there

    def fill(self, batch: Batch) -> StepInputs:
        """The batch's tokens, lengths and blocks as they are now."""
        ids: list[int] = []
        ends: list[int] = []
        for b, (request, num_rows, _, is_context) in enumerate(batch):
            kv, tokens = request.kv, request.tokens
            end = kv.committed + num_rows
            ends.append(end)
            if is_context:
                ids += tokens[kv.committed : end]
                self.next_prompt_token[b] = tokens[end] if end < len(tokens) else -1
            else:
                ids.append(tokens[-1])
                ids += request.drafts
            if kv.blocks is not self.blocks[b] or len(kv.blocks) != self.num_blocks[b]:
                self._write_table(b, kv.blocks)
        self.input_ids[:] = ids
        self.kv_lens[:] = ends
        self.input_ids.take(self.layout.draft_rows, out=self.draft_tokens)
        np.add(self.kv_lens[self.layout.owners], self.layout.back, out=self.positions)
        if not self.inputs.attn.kv_lens.is_inference():
            increment_version(self.inputs.attn.kv_lens)  # changed by numpy: who keeps what follows from it must know
        return self.inputs

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
        frame, last = self._frames
        if frame is None or frame.layout is not layout:
            frame = _Frame(layout)
        self._frames = last, frame
        return frame.fill(batch)

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
