"""Carry: the inputs of a step that are outputs of the step in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.core import StepInputs


@dataclass(frozen=True)
class Carry:
    """Where a step finds the outputs of the previous launch that are its inputs, so that the host need not wait.

    A request with `kept` >= 0 takes its inputs from that launch. What the step itself gives for such a request are
    placeholders: input_ids and draft_tokens hold any ids, and sampling.positions fit the placeholder kv_lens. Its rows
    and draft_lens are those of the most drafts that the previous launch may make. Where it made fewer, the rows left
    over have no draft: -1 in draft_tokens.
    """

    tokens: Tensor  # [T] int64, row * (max_draft_len + 1) + column in new_tokens; -1 = taken from input_ids
    kept: Tensor  # [B] int64, row of kept_lens; -1 = taken from attn.kv_lens

    def apply(
        self,
        inputs: StepInputs,
        new_tokens: Tensor,
        kept_lens: Tensor,
        vocab_size: int,
        new_parents: Tensor | None = None,
    ) -> StepInputs:
        """Return the inputs as they would be if the host had waited for the previous step.

        new_tokens [N, max_draft_len + 1] int64, kept_lens [N] int32 and new_parents [N, max_draft_len] int64 are
        buffers with the outputs of that step. An id past the vocabulary means that nothing could be drawn. Any valid id
        may replace it, as the request ends there. The row of a draft that does not exist may hold any id, too.
        """
        attn, spec = inputs.attn, inputs.spec
        ids = self.read_ids(inputs.input_ids, new_tokens, vocab_size)
        lens = self.read_lens(attn.kv_lens, kept_lens, spec.seq_lens)
        positions = spec.sampling.positions + (lens - attn.kv_lens)[spec.row_owners()]
        if spec.runtime_draft_len:
            rows = spec.gather_ids[spec.logits_rows()[spec.num_contexts :, 1:]]
            forced = self.read_forced(spec.forced_accept, F.pad(ids[rows], (0, 0, spec.num_contexts, 0)))
            spec = replace(spec, draft_tokens=ids[rows], forced_accept=forced)
            if spec.draft_parents is not None and new_parents is not None:
                spec = replace(spec, draft_parents=self.read_parents(spec.draft_parents, new_parents))
        sampling = replace(spec.sampling, positions=positions)
        return StepInputs(ids.clamp(min=0), replace(attn, kv_lens=lens), replace(spec, sampling=sampling))

    def read_ids(self, input_ids: Tensor, new_tokens: Tensor, vocab_size: int) -> Tensor:
        """The input_ids [T], -1 for a draft that does not exist; arguments as in `apply`."""
        carried = new_tokens.flatten()[self.tokens.clamp(min=0)].clamp(max=vocab_size - 1)
        return torch.where(self.tokens >= 0, carried, input_ids)

    def read_lens(self, kv_lens: Tensor, kept_lens: Tensor, num_rows: Tensor | int) -> Tensor:
        """The kv_lens [B] int32. num_rows: rows of each request in the step."""
        return torch.where(self.kept >= 0, kept_lens[self.kept.clamp(min=0)] + num_rows, kv_lens)

    def read_parents(self, draft_parents: Tensor, new_parents: Tensor) -> Tensor:
        """The draft_parents [G, K] int64; arguments as in `apply`."""
        kept = self.kept[self.kept.shape[0] - draft_parents.shape[0] :, None]  # [G, 1]
        made = new_parents[kept[:, 0].clamp(min=0), : draft_parents.shape[1]]
        return torch.where(kept >= 0, made, draft_parents)

    def read_forced(self, forced_accept: Tensor, drafts: Tensor) -> Tensor:
        """The forced_accept [B] int32, at most the number of drafts that exist. drafts: [B, K], -1 = no draft."""
        return torch.minimum(forced_accept, (drafts >= 0).sum(1, dtype=torch.int32))
