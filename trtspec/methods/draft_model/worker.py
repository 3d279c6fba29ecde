"""A smaller model inside the target's graph."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, StepInputs
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend


class DraftModelWorker(SpecWorker):
    """Drafts with a whole decoder (methods.draft_model.head), which draws exactly what it would draw beside the target.

    Its KV at a position is of the token at that position. Heads that read the target's states are a token ahead of
    that, and TensorRT-LLM runs a draft model as one of them: it never sees the first token of a prompt, and sees all
    others one place early. Here a request has one row more in the first pass than in the step: its own first row, and
    then the token after each row. Where the first one is there already it is computed anew, to the same bits. What
    rejected rows leave behind is overwritten later, as in the target.
    """

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """See base; T + B rows."""
        attn, T, B = inputs.attn, inputs.input_ids.shape[0], inputs.attn.batch_size
        rows = attn.widen(1)
        request = rows.requests(T + B)  # [T + B]
        # The step's row of the same position; for the additional row, the last one, it is the next request's first.
        same = torch.arange(T + B, device=request.device) - request
        is_first = same == attn.cu_q_lens.long()[request]
        after = self.prepare_context_input_ids(inputs.input_ids, accepted, attn, inputs.spec)  # [T]
        both = torch.cat((inputs.input_ids, after))  # [2 T]
        ids = both[torch.where(is_first, same, same + T - 1)]  # its own, or what is after the row before
        return self.first_pass(ids, captured, rows.positions(T + B), attend.at(rows)), rows
