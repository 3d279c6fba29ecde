"""From a batch of requests to the tensors of one launch.

While the same requests generate with the same draft lengths, most of a step's tensors are those of the step before:
they are made once per `Layout`. Step tensors are never written to, so steps in flight may share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.engine.scheduler import Batch, Scheduled
from trtspec.modes import SpeculativeDecodingMode

_Key = tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """What follows from who is in a batch, with how many rows and drafts each."""

    key: _Key
    cu_q_lens: Tensor  # [B+1] int32
    spec: SpecMetadata  # draft_tokens, next_prompt_token and sampling.positions are of the step that made it
    offsets: list[list[int]]  # per request: index of the token each of its logits rows draws, from its first row on


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
        self._tables: tuple[list[list[int]], Tensor] = ([], torch.empty(0, 0, dtype=torch.int32))

    def __call__(self, batch: Batch, next_draft_len: int = 0) -> StepInputs:
        """Pack the rows. T rows in request order; see core.SpecMetadata for the logits rows and next_draft_len."""
        K = max((row.draft_len for row in batch), default=0)
        K = next((length for length in self.graph_draft_lens if length >= max(K, next_draft_len)), K)
        layout = self._layout_of(batch, K)

        input_ids: list[int] = []
        drafts: list[list[int]] = []
        draws: list[int] = []
        for row, offsets in zip(batch, layout.offsets, strict=True):
            request, start = row.request, row.request.kv.committed
            if row.is_context:
                input_ids += request.tokens[start : row.end]
            else:
                input_ids += request.tokens[start:]
                input_ids += request.drafts
                drafts.append(request.drafts + [0] * (K - row.draft_len))
            draws += [start + offset for offset in offsets]

        attn = AttnMetadata(
            cu_q_lens=layout.cu_q_lens,
            kv_lens=torch.tensor([row.end for row in batch], dtype=torch.int32),
            block_tables=self._block_tables([row.request.kv.blocks for row in batch]),
            tree_mask=_NO_TREE,
        )
        spec = replace(
            layout.spec,
            draft_tokens=torch.tensor(drafts, dtype=torch.int64).view(len(drafts), K),
            next_prompt_token=torch.tensor([_next_prompt_token(row) for row in batch]),
            sampling=replace(layout.spec.sampling, positions=torch.tensor(draws)),
            next_draft_len=next_draft_len,
        )
        return StepInputs(torch.tensor(input_ids), attn, spec)

    def _layout_of(self, batch: Batch, K: int) -> _Layout:
        key: _Key = (K,)
        for row in batch:
            key += (row.request.request_id, row.num_rows, row.draft_len, row.is_context)
        if self._layout is None or self._layout.key != key:
            self._layout = self._make_layout(key, batch, K)
        return self._layout

    def _make_layout(self, key: _Key, batch: Batch, K: int) -> _Layout:
        q_lens = torch.tensor([row.num_rows for row in batch], dtype=torch.int32)
        cu_q_lens = torch.cat((q_lens.new_zeros(1), q_lens.cumsum(0, dtype=torch.int32)))
        gather_ids: list[int] = []
        offsets: list[list[int]] = []
        for row, begin in zip(batch, cu_q_lens.tolist(), strict=False):
            last = row.num_rows - row.draft_len - 1  # of the known tokens
            drafts = [0] if row.is_context else [min(j, row.draft_len) for j in range(K + 1)]
            gather_ids += [begin + last + j for j in drafts]
            offsets.append([last + 1 + j for j in drafts])
        owners = [row.request.sampling for row, own in zip(batch, offsets, strict=True) for _ in own]
        spec = SpecMetadata(
            spec_dec_mode=self.mode,
            max_draft_len=self.max_draft_len,
            request_ids=tuple(row.request.request_id for row in batch),
            seq_lens=q_lens,
            gather_ids=torch.tensor(gather_ids),
            draft_tokens=torch.empty(0, K, dtype=torch.int64),
            draft_lens=torch.tensor([row.draft_len for row in batch], dtype=torch.int32),
            next_prompt_token=torch.empty(0, dtype=torch.int64),
            forced_accept=torch.tensor(
                [-1 if row.is_context else self.forced_accept for row in batch], dtype=torch.int32
            ),
            sampling=SamplingTensors.of(owners, [0] * len(owners)),
        )
        return _Layout(key, cu_q_lens, spec, offsets)

    def _block_tables(self, tables: list[list[int]]) -> Tensor:
        """[B, columns] int32, padded with scratch; the last one again if nothing has changed."""
        if self._tables[0] != tables:
            self._tables = [list(table) for table in tables], AttnMetadata.pad_tables(tables)
        return self._tables[1]


_NO_TREE = torch.empty(0, dtype=torch.int32)


def _next_prompt_token(row: Scheduled) -> int:
    return -1 if row.emits else row.request.tokens[row.end]
