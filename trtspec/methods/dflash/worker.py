"""DFlash inside the target's graph; methods/dflash/head.py explains what the head computes.

A step appends K and V of the text's new positions to the layers' caches, those of its rejected rows too. Then the block
of every request, [n, mask x K'], runs after the tokens that are kept. Its rows overwrite the rejected ones; the text of
the next step will overwrite the block's rows.

A tree mask of ops.spec_attention with all bits set lets the rows of a block see each other. In a launch, a row always
sees the tokens before its request's rows; of the request's rows it sees those whose bits are set.

At the very end of a request, or where KV blocks run short, a row can have a position that no KV block covers. Such a
row is hidden from the others, because all such rows of a launch are written to one place, the scratch block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.core import AttnMetadata, StepInputs
from trtspec.methods.dflash.head import DFlashHead
from trtspec.methods.parallel.worker import MaskWorker
from trtspec.models.attention import PagedAttend
from trtspec.ops.attention import row_slots

_BITS = 32  # per word of a tree mask


class DFlashWorker(MaskWorker):
    """A worker that drafts one block for every request."""

    head: DFlashHead

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Append the text's KV and run the blocks -> output [B * K', H] of the mask rows, and the blocks' rows."""
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
        """Token that each request's block begins with, [B] int64; any id where there is none.

        accepted: [B, K+1], -1 after the counts [B] accepted tokens of each request.
        """
        last = accepted.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        return last.clamp(0, self.draft_ids.shape[0] - 1)

    def block(
        self, inputs: StepInputs, last: Tensor, counts: Tensor, width: int, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Run the head on a block for each request -> y [B, width, H], and the blocks' rows.

        A block has `width` rows: the token last [B], then masks. It follows the tokens that the request keeps.
        """
        attn, spec = inputs.attn, inputs.spec
        kept = attn.kv_lens - spec.draft_lens + (counts - 1).clamp(min=0).int()  # [B]
        masks = last.new_full((1, 1), self.mask_token_id).expand(spec.batch_size, width - 1)
        ids = torch.cat((last[:, None], masks), dim=1)  # [B, width]
        layer = self.head.first_layer
        block = block_rows(attn, kept, width, attend.tables(layer), attend.block_size(layer))
        y = self.head(ids.flatten(), last, block.positions(ids.numel()), attend.at(block))  # [B * width, H]
        return y.view(spec.batch_size, width, -1), block


def block_rows(attn: AttnMetadata, kept: Tensor, width: int, tables: Tensor, block_size: int) -> AttnMetadata:
    """Return metadata of `width` rows for every request, after its kept [B] int32 tokens.

    The rows of a request see each other as far as its KV blocks reach. tables: block tables [B, M] of the draft layers.
    block_size: tokens of a KV block.
    """
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
