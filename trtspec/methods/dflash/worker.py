"""DFlash inside the target's graph; see methods/dflash/head.py for what it computes.

A step appends K and V of the text's new positions to the layers' caches, those of its rejected rows too. Then comes the
block, [n, mask x K'] of every request, behind what is kept: its rows take the place of the rejected ones, and stand
where the next step's text will take theirs. That its rows see each other is a tree mask of ops.spec_attention, all bits
set: what stands before a request's rows of a launch is always seen, and of those rows the ones whose bits are set.

A row whose place no block of the cache covers, at the very end of a request or where blocks run short, is hidden from
the others: all such rows of a launch are written to one place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.core import AttnMetadata, SpecMetadata, StepInputs
from trtspec.methods.dflash.head import DFlashHead
from trtspec.methods.parallel.worker import MaskWorker
from trtspec.models.attention import PagedAttend
from trtspec.ops.attention import row_slots

_BITS = 32  # of a word of a tree mask


class DFlashWorker(MaskWorker):
    """A block for every request."""

    head: DFlashHead

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """See base -> [B * K', H] of the rows of masks, and the blocks."""
        c = self.read_text(inputs, captured, attend)
        K = inputs.spec.next_draft_len
        if K == 0:
            return c, inputs.attn
        last = self.last_tokens(accepted, counts)
        y, block = self.block(inputs, last, counts, K + 1, attend)
        return y[:, 1:].flatten(0, 1), block

    def read_text(self, inputs: StepInputs, captured: Tensor, attend: PagedAttend) -> Tensor:
        """Append the text's keys and values to the caches: captured [T, n * Ht] -> c [T, H]."""
        c = self.head.fuse(captured)
        self.head.read_in(c, inputs.attn.positions(c.shape[0]), attend)
        return c

    def last_tokens(self, accepted: Tensor, counts: Tensor) -> Tensor:
        """accepted [B, K+1], -1 past their number counts [B] -> the token that each request's block begins with, [B]
        int64, any where there is none."""
        last = accepted.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        return last.clamp(0, self.draft_ids.shape[0] - 1)

    def block(
        self, inputs: StepInputs, last: Tensor, counts: Tensor, width: int, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """`width` rows of each request: last [B] and masks, behind what is kept -> y [B, width, H], and the blocks."""
        attn, spec = inputs.attn, inputs.spec
        kept = attn.kv_lens - spec.draft_lens + (counts - 1).clamp(min=0).int()  # [B]
        masks = last.new_full((1, 1), self.mask_token_id).expand(spec.batch_size, width - 1)
        ids = torch.cat((last[:, None], masks), dim=1)  # [B, width]
        layer = self.head.first_layer
        block = blocks_behind(attn, kept, width, attend.tables(layer), attend.block_size(layer))
        y = self.head(ids.flatten(), last, block.positions(ids.numel()), attend.at(block))  # [B * width, H]
        return y.view(spec.batch_size, width, -1), block

    def drafting_rows(self, hidden: Tensor, counts: Tensor, attn: AttnMetadata, spec: SpecMetadata) -> Tensor:
        """All: those of masks."""
        return hidden


def blocks_behind(attn: AttnMetadata, kept: Tensor, width: int, tables: Tensor, block_size: int) -> AttnMetadata:
    """`width` rows of every request behind kept [B] int32 tokens, which see each other as far as the request's blocks
    reach: those of the draft layers' tables [B, M], of block_size tokens each."""
    B, device = attn.batch_size, kept.device
    request = torch.arange(B, device=device)[:, None]
    positions = kept.long()[:, None] + torch.arange(width, device=device)  # [B, width]
    slots = row_slots(tables, request, positions, block_size)  # [B, width]
    words = -(-width // _BITS)  # W
    bits = F.pad((slots >= block_size).int(), (0, words * _BITS - width))  # block 0 is scratch
    mask = (bits.view(B, words, _BITS).long() << torch.arange(_BITS, device=device)).sum(-1).int()  # [B, W]
    return replace(
        attn,
        cu_q_lens=torch.arange(B + 1, dtype=torch.int32, device=device) * width,
        kv_lens=kept + width,
        tree_mask=mask[:, None].expand(B, width, words).reshape(B * width, words),
        width=width,
    )
