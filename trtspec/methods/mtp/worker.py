"""MTP as it is trained (DeepSeek-AI, "DeepSeek-V3 technical report", arXiv 2412.19437, section 2.2): module i makes
draft i, and reads at position p the token at p + i + 1 and what module i - 1 put out at p (module 0: the target's
state). TensorRT-LLM's worker gives modules the target's states, moved by i rows, instead; no module was trained on
that.

A row of module i thus waits for i tokens more than one of module 0. So in each step the rows of module i stand i
positions further back and read the same tokens as module 0's. The last i positions are computed from drafts when module
i drafts, and again in the next step, whose tokens are known. Module i also wants what module i - 1 put out just before
the step's first row: so each module but the last keeps what it puts out in the paged cache, in a layer of its own which
has at position t what module i put out at t - i, half of it as keys, half as values. Chunks, shared prefixes and
preemption treat it as they treat KV.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, KVSpec, SamplingTensors, SpecMetadata
from trtspec.methods.chain import ChainState, draft_chain
from trtspec.methods.mtp.head import MtpHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend
from trtspec.models.layers import weight_bytes
from trtspec.ops.attention import row_slots


class MtpWorker(SpecWorker):
    """K modules for K drafts. Where a sequence is shorter than a module is deep, rows of positions that there are not
    hold anything, and nothing reads them."""

    head: MtpHead

    # -- all rows, all modules ----------------------------------------------------------------------------------------

    def first_pass(self, next_ids: Tensor, captured: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """-> [T, max(K - 1, 1) * H]: in row t of a request what modules 0, 1, ... put out at the positions of its rows
        t, t - 1, ..."""
        y = super().first_pass(next_ids, captured, positions, attend)  # [T, H] of module 0
        if self.max_draft_len == 1:
            return y
        attn, T = attend.attn, next_ids.shape[0]
        row, request = torch.arange(T, device=next_ids.device), attn.requests(T)  # [T]
        first, last = attn.cu_q_lens[:-1].long(), attn.cu_q_lens[1:].long() - 1  # [B] rows of each request
        start = attn.kv_lens.long() - 1 - (last - first)  # [B] position of the first
        here = self._slots(request, positions, attend)  # [T]
        before = self._slots(torch.arange(first.shape[0], device=row.device), start - 1, attend)  # [B]
        outputs = [y]
        for i in range(1, self.max_draft_len):
            kept = self._kept(i - 1, outputs[-1], here, before, attend)  # [B, H]
            # The rows stand at start - back ...; back = i, but no position is below 0.
            back = start.clamp(max=i)  # [B]
            moved = back - start.clamp(max=i - 1)  # [B] 1; 0 where module i - 1's rows stand there too
            short = (i - back)[request]  # [T] 0; or how many rows further on the tokens are
            source = row - moved[request]  # [T] row of module i - 1 at the same position
            h = torch.where((source < first[request])[:, None], kept[request], y[source.clamp(min=0)])
            ids = next_ids[torch.minimum(row + short, last[request])]
            there = replace(attn, kv_lens=attn.kv_lens - back.int())
            h = self.head.feedback(h, i - 1)
            y = self.head(ids, h, positions - back[request], attend.at(there), i)
            outputs.append(y[torch.maximum(row - short, first[request])])
        # In one tensor, so that drafts wait for all of it: a cache that modules draft into is no longer read from.
        return torch.cat(outputs[:-1], dim=-1)

    def _kept(self, module: int, y: Tensor, here: Tensor, before: Tensor, attend: PagedAttend) -> Tensor:
        """Keep y [T, H] of the rows at slots `here` [T] -> what was kept at slots `before` [B], [B, H]. Those are of
        earlier steps: to read last makes sure that nothing is read of a cache which is already written to."""
        layer = self._first_kept + module
        k, v = y[:, None].chunk(2, dim=-1)  # [T, 1, H / 2] each
        attend.write(layer, here, k, v)
        return torch.cat(attend.read(layer, before), dim=-1)[:, 0]

    def _slots(self, request: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """Of each request [N] and position [N]; scratch for -1."""
        tables, block_size = attend.tables(self._first_kept), attend.block_size(self._first_kept)
        return row_slots(tables, request, positions, block_size)

    @property
    def _first_kept(self) -> int:
        """The layer of what module 0 put out, behind the modules' KV; those of the next modules follow."""
        return self.head.first_layer + self.max_draft_len

    # -- the drafts ---------------------------------------------------------------------------------------------------

    def draft(
        self,
        hidden: Tensor,
        counts: Tensor,
        kv_lens: Tensor,
        attn: AttnMetadata,
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> tuple[Tensor, Tensor]:
        """See base."""
        # Behind a chunk of a prompt nothing is drafted, and rows made of guesses must not come to stand in blocks that
        # are shared: to scratch with them.
        return super().draft(hidden, counts, kv_lens, attn.keep(counts > 0), spec, attend)

    def draft_from(
        self, hidden: Tensor, attn: AttnMetadata, sampling: SamplingTensors, num_drafts: int, attend: PagedAttend
    ) -> Tensor:
        """See base. Pass i is module i over the last i positions, whose tokens are i drafts."""
        B, known = attn.batch_size, attn.kv_lens.long()  # [B] tokens that are kept
        request = torch.arange(B, device=known.device)
        outputs = hidden.view(B, max(self.max_draft_len - 1, 1), -1)  # [B, K-1, H] module j's at known - 1 - j
        drafts: list[Tensor] = []

        def forward(step: int, state: ChainState) -> tuple[Tensor, Tensor]:
            assert state.hidden is not None
            drafts.append(state.tokens)
            column = torch.arange(step, device=known.device)
            # The rows stand at known - step ...; where there are fewer positions they begin at 0, and the last ones,
            # behind what is known, are in vain.
            short = (step - known).clamp(min=0)[:, None]  # [B, 1]
            ids = torch.stack(drafts, dim=1).gather(1, (column + short).clamp(max=step - 1))  # [B, step]
            # of module step - 1: the last row that it made of known tokens, and the rows that it drafted with
            before = torch.cat((outputs[:, step - 1 : step], state.hidden), dim=1)  # [B, step, H]
            h = before[request[:, None], (column + (short > 0)).clamp(max=step - 1)]  # [B, step, H]
            there = replace(
                attn.advance(),
                cu_q_lens=torch.arange(B + 1, dtype=torch.int32, device=known.device) * step,
                kv_lens=known.clamp(min=step).int(),
                width=step,
            )
            h = self.head.feedback(h.flatten(0, 1), step - 1)
            y = self.head(ids.flatten(), h, there.positions(B * step), attend.at(there), step)
            y = y.view(B, step, -1)
            return self.sample_drafts(step, y[request, known.clamp(max=step) - 1], state.sampling), y

        first = self.sample_drafts(0, outputs[:, 0], sampling)
        start = ChainState(first, attn.advance(), sampling.advance(), outputs[:, :0])
        return draft_chain(start, num_drafts, forward)

    # -- what it takes ------------------------------------------------------------------------------------------------

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """See base; behind the modules' layers those of what they keep."""
        kept = KVSpec(1, self.head.spec.layer.hidden_size // 2)
        return (*super().kv_layers, *[kept] * (self.max_draft_len - 1))

    @property
    def weight_bytes_per_step(self) -> int:
        """See base; all but the first module run twice."""
        return super().weight_bytes_per_step + sum(weight_bytes(module) for module in self.head.mtp[1:])
