"""From a batch of requests to the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.engine.scheduler import Batch, Scheduled
from trtspec.modes import SpeculativeDecodingMode


@dataclass(frozen=True)
class BatchAssembler:
    """What stays the same from step to step. `forced_accept`: drafts counted as accepted in any case, -1 = off.
    `graph_draft_lens`: K of the compiled graphs in rising order; a step's K is rounded up to one of them."""

    mode: SpeculativeDecodingMode
    max_draft_len: int
    forced_accept: int
    graph_draft_lens: tuple[int, ...] = ()

    def __call__(self, batch: Batch, next_draft_len: int = 0) -> StepInputs:
        """Pack the rows. T rows in request order; see core.SpecMetadata for the logits rows and next_draft_len."""
        generations = [row for row in batch if not row.is_context]
        K = max((row.draft_len for row in batch), default=0)
        K = next((length for length in self.graph_draft_lens if length >= max(K, next_draft_len)), K)

        input_ids: list[int] = []
        gather_ids: list[int] = []
        draws: list[int] = []  # index of the token that each logits row draws
        for row in batch:
            tokens, start = row.request.tokens, row.request.kv.committed
            first = len(input_ids) + row.num_rows - row.draft_len - 1  # packed row of the last known token
            input_ids += tokens[start : row.end - row.draft_len]
            input_ids += row.request.drafts[: row.draft_len]
            offsets = [0] if row.is_context else [min(j, row.draft_len) for j in range(K + 1)]
            gather_ids += [first + j for j in offsets]
            draws += [row.end - row.draft_len + j for j in offsets]
        owners = [row.request.sampling for row in batch for _ in range(1 if row.is_context else K + 1)]

        attn = AttnMetadata.of(
            [row.num_rows for row in batch], [row.end for row in batch], [row.request.kv.blocks for row in batch]
        )
        drafts = [[*row.request.drafts, *[0] * (K - row.draft_len)] for row in generations]
        spec = SpecMetadata(
            spec_dec_mode=self.mode,
            max_draft_len=self.max_draft_len,
            request_ids=tuple(row.request.request_id for row in batch),
            seq_lens=attn.cu_q_lens[1:] - attn.cu_q_lens[:-1],
            gather_ids=torch.tensor(gather_ids),
            draft_tokens=torch.tensor(drafts, dtype=torch.int64).view(len(generations), K),
            draft_lens=torch.tensor([row.draft_len for row in batch], dtype=torch.int32),
            next_prompt_token=torch.tensor([_next_prompt_token(row) for row in batch]),
            forced_accept=torch.tensor(
                [-1 if row.is_context else self.forced_accept for row in batch], dtype=torch.int32
            ),
            sampling=SamplingTensors.of(owners, draws),
            next_draft_len=next_draft_len,
        )
        return StepInputs(torch.tensor(input_ids), attn, spec)


def _next_prompt_token(row: Scheduled) -> int:
    return -1 if row.emits else row.request.tokens[row.end]
