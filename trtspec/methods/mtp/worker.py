"""MTP as it is trained: module i makes draft i.

Training is described in DeepSeek-AI, "DeepSeek-V3 technical report", arXiv 2412.19437, section 2.2. At position p,
module i reads the token at p + i + 1 and the output of module i - 1 at p. Module 0 reads the target's state at p
instead. TensorRT-LLM's worker gives all modules the target's states, moved by i rows; no module was trained on that.

A row of module i thus waits for i tokens more than a row of module 0. So in each step the rows of module i stand i
positions further back, and read the same tokens as the rows of module 0. The last i positions are computed from drafts
when module i drafts. They are computed again in the next step, whose tokens are known.

Module i also needs the output of module i - 1 just before the step's first row. So each module but the last keeps its
output in the paged cache, in a layer of its own. At position t this layer holds the output of module i at t - i, half
of it as keys, half as values. Chunks, shared prefixes and preemption treat the layer as they treat KV.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, KVSpec, Proposal, SamplingTensors, SpecMetadata
from trtspec.methods.chain import ChainState, draft_chain
from trtspec.methods.mtp.head import MtpHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend
from trtspec.models.layers import weight_bytes
from trtspec.ops.attention import row_slots


class MtpWorker(SpecWorker):
    """A worker with K modules for K drafts.

    Where a sequence has fewer than i positions, some rows of module i have no position of their own. They hold nothing
    useful, and no code reads them.
    """

    head: MtpHead

    # -- all rows, all modules ----------------------------------------------------------------------------------------

    def first_pass(
        self,
        next_ids: Tensor,
        captured: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run all modules; return the outputs of all but the last, [R, max(K - 1, 1) * H]; with K = 1 that of module 0.

        Row t of a request holds the outputs of modules 0, 1, ... at the positions of its rows t, t - 1, ...
        """
        if self.max_draft_len == 1:
            return super().first_pass(next_ids, captured, positions, attend, rows)
        y = super().first_pass(next_ids, captured, positions, attend)  # [T, H], output of module 0
        attn, T = attend.attn, next_ids.shape[0]
        row, request = torch.arange(T, device=next_ids.device), attn.requests(T)  # [T]
        first, last = attn.cu_q_lens[:-1].long(), attn.cu_q_lens[1:].long() - 1  # [B] rows of each request
        start = attn.kv_lens.long() - 1 - (last - first)  # [B] position of the first row
        here = self._slots(request, positions, attend)  # [T]
        before = self._slots(torch.arange(first.shape[0], device=row.device), start - 1, attend)  # [B]
        outputs = [y]
        for i in range(1, self.max_draft_len):
            kept = self._kept(i - 1, outputs[-1], here, before, attend)  # [B, H]
            # The rows begin at start - back. `back` is i, or less so that no position is below 0.
            back = start.clamp(max=i)  # [B]
            moved = back - start.clamp(max=i - 1)  # [B] 1; 0 where module i - 1's rows begin there too
            short = (i - back)[request]  # [T] 0; or the number of rows that the tokens are further on
            source = row - moved[request]  # [T] row of module i - 1 at the same position
            h = torch.where((source < first[request])[:, None], kept[request], y[source.clamp(min=0)])
            ids = next_ids[torch.minimum(row + short, last[request])]
            there = replace(attn, kv_lens=attn.kv_lens - back.int())
            h = self.head.feedback(h, i - 1)
            y = self.head(ids, h, positions - back[request], attend.at(there), i)
            outputs.append(y[torch.maximum(row - short, first[request])])
        # One tensor, so that drafts wait for all of it: once modules draft into a cache, no code here reads from it.
        made = torch.cat(outputs[:-1], dim=-1)
        return made if rows is None else made[rows]

    def _kept(self, module: int, y: Tensor, here: Tensor, before: Tensor, attend: PagedAttend) -> Tensor:
        """Keep y [T, H] in the slots `here` [T]; return what was kept in the slots `before` [B], [B, H].

        The slots `before` are of earlier steps. The read comes last, so that no code reads an old version of a cache
        that was already written to.
        """
        layer = self._first_kept + module
        k, v = y[:, None].chunk(2, dim=-1)  # [T, 1, H / 2] each
        attend.write(layer, here, k, v)
        return torch.cat(attend.read(layer, before), dim=-1)[:, 0]

    def _slots(self, request: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """Return the cache slot of each request [N] and position [N]; scratch for position -1."""
        tables, block_size = attend.tables(self._first_kept), attend.block_size(self._first_kept)
        return row_slots(tables, request, positions, block_size)

    @property
    def _first_kept(self) -> int:
        """Index of the layer with module 0's output, after the modules' KV layers; those of later modules follow."""
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
    ) -> Proposal:
        """Return drafts as SpecWorker.draft does; after a chunk of a prompt their rows go to scratch."""
        # After a chunk of a prompt nothing is drafted. Rows computed from guesses must not be written to shared blocks,
        # so they go to scratch.
        return super().draft(hidden, counts, kv_lens, attn.keep(counts > 0), spec, attend)

    def draft_from(
        self,
        hidden: Tensor,
        attn: AttnMetadata,
        sampling: SamplingTensors,
        num_drafts: int,
        attend: PagedAttend,
        probs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the drafts, with the arguments of SpecWorker.draft_from.

        Pass i is module i over the last i positions, whose tokens are i drafts.
        """
        B, known = attn.batch_size, attn.kv_lens.long()  # [B] number of tokens that are kept
        request = torch.arange(B, device=known.device)
        outputs = hidden.view(B, max(self.max_draft_len - 1, 1), -1)  # [B, K-1, H] module j's output at known - 1 - j
        drafts: list[Tensor] = []

        def forward(step: int, state: ChainState) -> tuple[Tensor, Tensor]:
            assert state.hidden is not None
            drafts.append(state.tokens)
            column = torch.arange(step, device=known.device)
            # The rows begin at known - step. Where there are fewer positions they begin at 0, and the last rows, after
            # the known tokens, are of no use.
            short = (step - known).clamp(min=0)[:, None]  # [B, 1]
            ids = torch.stack(drafts, dim=1).gather(1, (column + short).clamp(max=step - 1))  # [B, step]
            # outputs of module step - 1: its last row of known tokens, and the rows that it drafted with
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
            return self.sample_drafts(step, y[request, known.clamp(max=step) - 1], state.sampling, probs), y

        first = self.sample_drafts(0, outputs[:, 0], sampling, probs)
        start = ChainState(first, attn.advance(), sampling.advance(), outputs[:, :0])
        return draft_chain(start, num_drafts, forward)

    # -- resources ----------------------------------------------------------------------------------------------------

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """KV layers of the modules, then the layers in which modules keep their outputs."""
        kept = KVSpec(1, self.head.spec.layer.hidden_size // 2)
        return (*super().kv_layers, *[kept] * (self.max_draft_len - 1))

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one step reads; all modules but the first run twice."""
        return super().weight_bytes_per_step + sum(weight_bytes(module) for module in self.head.mtp[1:])
