"""process_logits with FlashInfer's top-k and top-p. The kernel registered before does the rest, before and after.

Our rules are those of FlashInfer's kernels in version 0.7.2. top_k_mask_logits finds the k-th logit exactly and keeps
all that are not below it, so all ties. top_p_renorm_probs finds the largest probability such that it and those above
sum to at least p. It keeps all that are not below that probability. Ours drops a token if those above it sum to at
least p, which is the same. But sums are rounded: top-p may decide differently from the reference about a token within
rounding errors of the edge. The result is probabilities: tokens with 0 there are removed from the logits.

FlashInfer is asked to add integers (is_deterministic), so that the order in which programs finish does not matter. By
its source, a row's result then depends on the row alone. In vocabularies below 2048 it searches for the edge of top-p
approximately instead: such calls go to the other kernel. For a row with NaN nothing is guaranteed.

Nothing here waits for the GPU. The calls may be captured in a CUDA graph once they have run outside one: top-k
allocates and clears a buffer the first time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LEAST_VOCABULARY = 2048
LEAST_P = 1e-6  # FlashInfer takes 0 < p < 1; ours also takes 0: the most likely token alone


class Filter:
    """The op process_logits. `before` is the kernel that does the rest."""

    def __init__(self, flashinfer: ModuleType, before: Any) -> None:
        self.sampling = flashinfer.sampling
        self.before = before

    def __call__(
        self, keyset: Any, logits: Tensor, positions: Tensor, history: Tensor, prompt_lens: Tensor, penalties: Tensor,
        bias_ids: Tensor, bias_values: Tensor, ban_ids: Tensor, ban_until: Tensor, allow_mask: Tensor,
        temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
    ) -> Tensor:  # fmt: skip
        first = (
            history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask, temperatures
        )  # fmt: skip
        filters = (top_ks, top_ps, min_ps)
        if logits.shape[1] < LEAST_VOCABULARY or not (top_ks.numel() or top_ps.numel()):
            result: Tensor = self.before.call_boxed(keyset, logits, positions, *first, *filters)
            return result
        out: Tensor = self.before.call_boxed(keyset, logits, positions, *first, *map(_unused, filters))  # [R, V]
        if top_ks.numel():
            off = (top_ks <= 0) | (top_ks > logits.shape[1])
            out = self.sampling.top_k_mask_logits(out, torch.where(off, logits.shape[1], top_ks))
        if top_ps.numel():
            on = top_ps < 1  # [R]
            p = torch.where(on, top_ps.clamp(min=LEAST_P), 0.5)
            kept = self.sampling.top_p_renorm_probs(out.softmax(1), p, is_deterministic=True)  # [R, V]
            out = out.masked_fill((kept == 0) & on[:, None], float("-inf"))
        if min_ps.numel():
            unused = (*map(_unused, first), _unused(top_ks), _unused(top_ps))
            out = self.before.call_boxed(keyset, out, positions, *unused, min_ps)
        return out


def _unused(argument: Tensor) -> Tensor:
    return argument.new_empty(0)
