"""A smaller model that drafts inside the target's graph."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, StepInputs
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend


class DraftModelWorker(SpecWorker):
    """A worker that drafts with a whole decoder (methods.draft_model.head).

    The decoder draws exactly what it would draw next to the target. Its KV at a position is of the token at that
    position. Heads that read the target's states are one token ahead of that. TensorRT-LLM runs a draft model like such
    a head: the model never sees the first token of a prompt, and sees all others one position early.

    Here a request has one row more in the first pass than in the step: its own first row, and then the token after each
    row. If the KV of the first row exists already, it is computed again, to the same bits. Later rows overwrite the KV
    of rejected rows, as in the target.
    """

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Run the first pass over T + B rows; return its output [B, H] at the drafting rows, and all these rows."""
        attn, T, B = inputs.attn, inputs.input_ids.shape[0], inputs.attn.batch_size
        rows = attn.widen(1)
        request = rows.requests(T + B)  # [T + B]
        # The step's row at the same position. For a request's additional row, its last, this is the row after the
        # request's own: the first row of the next request.
        same = torch.arange(T + B, device=request.device) - request
        is_first = same == attn.cu_q_lens.long()[request]
        after = self.prepare_context_input_ids(inputs.input_ids, accepted, attn, inputs.spec)  # [T]
        both = torch.cat((inputs.input_ids, after))  # [2 T]
        ids = both[torch.where(is_first, same, same + T - 1)]  # its own token, or the token after the row before
        last = self.drafting_rows(counts, rows, inputs.spec)
        return self.first_pass(ids, captured, rows.positions(T + B), attend.at(rows), last), rows
