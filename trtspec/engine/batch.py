"""Builds the input tensors of one launch from a batch of requests.

As long as the same requests run with the same numbers of rows and drafts, the shapes of a step's tensors and most of
their contents do not change. A `_Layout` holds those tensors. The tensors that change are preallocated twice, in two
`_Frame`s that alternate, so that a step in flight keeps its own inputs. The latest layouts are kept: the number of
drafts often changes from step to step, and few requests have few combinations. `_Members` is what successive layouts of
the same requests share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch.autograd.graph import increment_version

from trtspec.carry import Carry
from trtspec.config.tree import Tree
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.engine.constraints import logit_constraints
from trtspec.engine.scheduler import Batch
from trtspec.modes import SpeculativeDecodingMode


class _Members:
    """The requests of a batch: their ids and sampling parameters."""

    def __init__(self, batch: Batch) -> None:
        self.requests = [row.request for row in batch]
        self.ids = tuple([request.request_id for request in self.requests])
        self.sampling = SamplingTensors.of([request.sampling for request in self.requests], ())


@dataclass(frozen=True)
class _Layout:
    """Tensors that depend only on the requests of a batch and their numbers of rows and drafts.

    Frames share them; nothing writes to them.
    """

    batch: Batch
    members: _Members
    cu_q_lens: torch.Tensor  # [B+1] int32
    spec: SpecMetadata  # without draft_tokens, next_prompt_token and sampling.positions, which each frame has
    owners: np.ndarray  # [R] request of each logits row
    back: np.ndarray  # [R] position of the token it draws, relative to its request's kv_len: <= 0
    draft_rows: np.ndarray  # [G, K] packed row of each draft; past the draft_len, the last one again
    shapes_trees: bool  # the drafts of each request are a tree of their own
    frames: list[_Frame] = field(default_factory=list)  # at most two; the second is that of the last step

    def next_frame(self, last: _Frame | None) -> _Frame:
        """Return the older of the two frames, which becomes the newer one. last: that of the last step."""
        if len(self.frames) < 2:
            self.frames.append(_Frame(self, last))
        else:
            self.frames.reverse()
        return self.frames[-1]


class _Frame:
    """The inputs of one step, and the numpy arrays that share memory with its changing tensors.

    last: the frame of the last step, if there is one. Its block tables are copied if its requests are the same.
    """

    def __init__(self, layout: _Layout, last: _Frame | None) -> None:
        self.layout = layout
        B, spec = len(layout.batch), layout.spec
        self.input_ids = np.empty(layout.cu_q_lens.numpy()[-1], dtype=np.int64)
        self.kv_lens = np.empty(B, dtype=np.int32)
        self.draft_tokens = np.empty(layout.draft_rows.shape, dtype=np.int64)
        self.draft_parents = np.full(layout.draft_rows.shape if layout.shapes_trees else (0, 0), -1, dtype=np.int64)
        self.positions = np.empty(len(layout.owners), dtype=np.int64)
        self.next_prompt_token = np.full(B, -1, dtype=np.int64)
        self.tables = np.empty((B, 0), dtype=np.int32)
        self.blocks: list[list[int]] = [[]] * B  # the block list that each row of `tables` was written from
        self.num_blocks = [0] * B  # number of its blocks that were written
        if last is not None and last.layout.members is layout.members:
            self.tables, self.blocks, self.num_blocks = last.tables.copy(), last.blocks.copy(), last.num_blocks.copy()
        tensor = torch.from_numpy
        width = layout.draft_rows.shape[1] + 1 if spec.is_uniform else 0
        attn = AttnMetadata(layout.cu_q_lens, tensor(self.kv_lens), tensor(self.tables), _NO_TREE, width=width)
        spec = replace(
            spec,
            draft_tokens=tensor(self.draft_tokens),
            draft_parents=tensor(self.draft_parents) if layout.shapes_trees else None,
            next_prompt_token=tensor(self.next_prompt_token),
            sampling=replace(spec.sampling, positions=tensor(self.positions)),
        )
        self.inputs = StepInputs(tensor(self.input_ids), attn, spec)
        written = (self.input_ids, self.positions, self.kv_lens, self.draft_tokens)
        self.memory = [one.data.cast("B") for one in written if one.size]  # for repeat
        self.has_version = not attn.kv_lens.is_inference()
        self.stale = True  # repeat() must compare all tables with the requests' blocks
        self.new_blocks: list[tuple[int, int, int]] = []  # else it writes only these: row, column, block

    def fill(self, batch: Batch) -> StepInputs:
        """Write the current tokens, lengths and blocks of the batch."""
        ids: list[int] = []
        ends: list[int] = []
        for b, (request, num_rows, _, is_context) in enumerate(batch):
            kv, tokens, start = request.kv, request.tokens, request.num_scheduled_tokens
            end = start + num_rows
            ends.append(end)
            if is_context:
                ids += tokens[start:end]
                self.next_prompt_token[b] = tokens[end] if end < len(tokens) else -1
            elif request.input_in_flight:
                ids += [0] * num_rows  # outputs of the step in flight, see InputBuilder.carry
            else:
                ids.append(tokens[-1])
                ids += request.drafts
            if kv.blocks is not self.blocks[b] or len(kv.blocks) != self.num_blocks[b]:
                self._write_table(b, kv.blocks)
        self.stale = False
        self.input_ids[:] = ids
        self.kv_lens[:] = ends
        if self.layout.shapes_trees:
            generations = [row for row in batch if not row.is_context]
            for parents, (request, _, num_drafts, _) in zip(self.draft_parents, generations, strict=True):
                known = not request.input_in_flight  # else the previous step has them, see InputBuilder.carry
                parents[:num_drafts] = request.draft_parents[:num_drafts] if known else -1
        self.input_ids.take(self.layout.draft_rows, out=self.draft_tokens)
        np.add(self.kv_lens[self.layout.owners], self.layout.back, out=self.positions)
        return self._changed()

    def repeat(self, ids: list[int], ends: list[int]) -> StepInputs:
        """Inputs for the same batch of generations: ids [B * (K+1)], ends [B]. Reads nothing of the requests.

        A launch evicts the host's data and code from the CPU caches. Each object created here is a cache miss, and the
        first call of an array function takes longer to fetch than to run, so this uses few of both.
        """
        if self.stale:
            for b, row in enumerate(self.layout.batch):
                self._write_table(b, row.request.kv.blocks)
            self.stale = False
        else:
            for b, column, block in self.new_blocks:
                self._add_block(b, column, block)
        self.new_blocks.clear()
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
        """The inputs, marked as modified: torch does not see writes through numpy, and ops cache by tensor version."""
        if self.has_version:
            increment_version(self.inputs.attn.kv_lens)
        return self.inputs

    def _add_block(self, b: int, column: int, block: int) -> None:
        """Write a row's new block to its column."""
        if column < self.tables.shape[1]:
            self.tables[b, column] = block
            self.num_blocks[b] = column + 1
        else:
            self._write_table(b, self.blocks[b])

    def _write_table(self, b: int, blocks: list[int]) -> None:
        """Update one row of the block tables. Unused columns hold scratch block 0."""
        if len(blocks) > self.tables.shape[1]:
            wider = np.zeros((len(self.tables), len(blocks) + _SPARE_COLUMNS), dtype=np.int32)
            wider[:, : self.tables.shape[1]] = self.tables
            self.tables = wider
            attn = replace(self.inputs.attn, block_tables=torch.from_numpy(wider))
            self.inputs = replace(self.inputs, attn=attn)
        written = self.num_blocks[b] if blocks is self.blocks[b] else 0
        self.tables[b, written : len(blocks)] = blocks[written:]
        if written == 0:
            self.tables[b, len(blocks) :] = 0
        self.blocks[b], self.num_blocks[b] = blocks, len(blocks)


class InputBuilder:
    """Builds StepInputs.

    forced_accept: number of drafts that count as accepted whatever they are, -1 = off. graph_draft_lens: the K of the
    compiled graphs, ascending; the K of a step is rounded up to one of them. Empty: any K runs. tree: the shape of the
    drafts, whose nodes are counted where chains count K; None = chains. The inputs are those of a chain, as the step
    itself places the nodes (methods.tree).
    """

    def __init__(
        self,
        mode: SpeculativeDecodingMode,
        max_draft_len: int,
        forced_accept: int,
        graph_draft_lens: Sequence[int] = (),
        tree: Tree | None = None,
    ) -> None:
        self.mode = mode
        self.max_draft_len = max_draft_len
        self.forced_accept = forced_accept
        self.graph_draft_lens = graph_draft_lens
        self.tree = tree
        self._layouts: list[_Layout] = []  # those of the latest steps, the last one first
        self._frame: _Frame | None = None  # that of the last step

    def build(self, batch: Batch, next_draft_len: int = 0) -> StepInputs:
        """Inputs of T packed rows in the order of the batch; core.SpecMetadata explains logits rows and next_draft_len.

        The tensors stay valid until the inputs of the second step from now are built.
        """
        self._frame = self._layout_of(batch, next_draft_len).next_frame(self._frame)
        inputs = self._frame.fill(batch)
        constraints = logit_constraints(batch, self.tree)
        return inputs if constraints is None else replace(inputs, spec=replace(inputs.spec, constraints=constraints))

    def carry(self, batch: Batch, last: Batch) -> Carry:
        """The outputs of `last`, which is in flight, that are inputs of this batch."""
        rows_of_last = {id(row.request): b for b, row in enumerate(last)}
        tokens: list[int] = []
        kept = []
        for request, num_rows, _, _ in batch:
            row_of_last = rows_of_last[id(request)] if request.input_in_flight else -1
            kept.append(row_of_last)
            start = row_of_last * (self.max_draft_len + 1)
            tokens += range(start, start + num_rows) if request.input_in_flight else [-1] * num_rows
        return Carry(torch.tensor(tokens), torch.tensor(kept))

    def repeat_batch(self, ids: list[int], ends: list[int]) -> StepInputs:
        """Inputs for the last batch again, which consists of generations.

        ids [B * (K+1)]: the input tokens. ends [B]: length of each sequence including them. If blocks changed since the
        last step, call invalidate_tables or add_blocks first.
        """
        self._frame = self._layouts[0].next_frame(self._frame)
        return self._frame.repeat(ids, ends)

    def invalidate_tables(self) -> None:
        """Make repeat_batch compare the block tables with the requests once."""
        for frame in self._layouts[0].frames:
            frame.stale = True

    def add_blocks(self, b: int, start: int, blocks: list[int]) -> None:
        """Add new blocks to row b of the last batch, from column `start` of its table on, for repeat_batch."""
        for frame in self._layouts[0].frames:
            frame.new_blocks += [(b, start + i, block) for i, block in enumerate(blocks)]

    def _layout_of(self, batch: Batch, next_draft_len: int) -> _Layout:
        """Return a kept layout, or a new one. It becomes the first of those that are kept."""
        for i, layout in enumerate(self._layouts):
            if layout.batch == batch and layout.spec.next_draft_len == next_draft_len:
                self._layouts.insert(0, self._layouts.pop(i))
                return layout
        layout = self._make_layout(batch, next_draft_len)
        self._layouts = [layout, *self._layouts[: _KEPT - 1]]
        return layout

    def _make_layout(self, batch: Batch, next_draft_len: int) -> _Layout:
        members = self._members_of(batch)
        shapes_trees = self.tree is not None and self.tree.is_dynamic
        lens = [row.draft_len for row in batch]
        B, C, K = len(batch), sum([row.is_context for row in batch]), max(lens)
        K = next((length for length in self.graph_draft_lens if length >= max(K, next_draft_len)), K)
        num_rows = np.array([row.num_rows for row in batch], dtype=np.int32)
        draft_lens = np.array(lens, dtype=np.int32)
        cu_q_lens = np.zeros(B + 1, dtype=np.int32)
        np.cumsum(num_rows, out=cu_q_lens[1:])
        owners = np.array([b for b, length in enumerate(lens) for _ in range(length + 1)])
        back = np.array([nth for length in lens for nth in range(-length, 1)])
        forced = np.full(B, self.forced_accept, dtype=np.int32)
        forced[:C] = -1
        tensor = torch.from_numpy
        spec = SpecMetadata(
            spec_dec_mode=self.mode,
            max_draft_len=self.max_draft_len,
            request_ids=members.ids,
            seq_lens=tensor(num_rows),
            gather_ids=tensor(cu_q_lens[owners + 1] - 1 + back),
            draft_tokens=_NO_TOKENS,
            draft_lens=tensor(draft_lens),
            next_prompt_token=_NO_TOKENS,
            forced_accept=tensor(forced),
            sampling=members.sampling.expand(owners, tensor(back)),
            next_draft_len=next_draft_len,
            is_uniform=C == 0 and min(lens) == K,
            is_spec_dec_tree=self.tree is not None,
            is_spec_dec_dynamic_tree=shapes_trees,
        )
        missing = [[min(k - length, 0) for k in range(1, K + 1)] for length in lens[C:]]
        draft_rows = cu_q_lens[C + 1 :, None] - 1 + np.array(missing, dtype=np.int64).reshape(B - C, K)
        return _Layout(batch, members, tensor(cu_q_lens), spec, owners, back, draft_rows, shapes_trees)

    def _members_of(self, batch: Batch) -> _Members:
        """Those of the last layout if it has the same requests, else new ones."""
        if self._layouts and self._layouts[0].members.requests == [row.request for row in batch]:
            return self._layouts[0].members
        return _Members(batch)


_KEPT = 8  # layouts; one request has K + 1 of them
_SPARE_COLUMNS = 16  # added when a block table grows, so that it does not grow every few steps
_NO_TREE = torch.empty(0, dtype=torch.int32)
_NO_TOKENS = torch.empty(0, dtype=torch.int64)
