"""process_logits with FlashInfer's top-k and top-p; all else, before and after, by the kernel registered before.

Our rules are FlashInfer's, as its kernels of 0.7.2 are written. top_k_mask_logits finds the k-th logit exactly and
keeps all that are not below it, so all ties. top_p_renorm_probs finds the largest probability such that it and those
above sum to p at least, and keeps all that are not below it; ours drops a token if those above it sum to p at least,
which is the same. But sums are rounded: what top-p keeps may differ from the reference for a token within rounding
errors of the edge. It gives probabilities: what is 0 there is removed from the logits.

It is asked to add integers (is_deterministic), so that the order in which programs finish does not matter: by its
source, a row's result is then its own. In vocabularies below 2048 FlashInfer searches for the edge of top-p
approximately instead: those are not taken. Of a row with NaN nothing is promised.

Nothing here waits for the GPU. In a CUDA graph the calls belong once they have run outside one: top-k allocates and
clears a buffer the first time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LEAST_VOCABULARY = 2048
LEAST_P = 1e-6  # FlashInfer takes 0 < p < 1, ours takes 0 as well: the most likely token alone


class Filter:
    """The op; `before` is the kernel that does the rest."""

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
