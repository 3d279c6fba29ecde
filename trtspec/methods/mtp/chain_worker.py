"""MTP modules that make more drafts than there are modules.

Pass i of the chain is module i modulo the number of modules, as in vLLM. A single module thus makes all drafts.

A module reads its own KV of all earlier positions, also where another module drafted. vLLM reads whatever the cache
contains there. Here each row that a module drafts from also runs through the modules that draft after it. Each of them
reads the same token and the output of the module before it. So a draft depends on the text alone.
"""

from __future__ import annotations

from torch import Tensor

from trtspec.methods.mtp.head import MtpHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import Attend, PagedAttend
from trtspec.models.layers import weight_bytes


class MtpChainWorker(SpecWorker):
    """A worker that makes K drafts with n <= K modules."""

    head: MtpHead

    def first_pass(
        self,
        next_ids: Tensor,
        captured: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run module 0 over all rows, then write the rows' KV for the modules of later passes."""
        if not self._later(0):
            return super().first_pass(next_ids, captured, positions, attend, rows)
        y = super().first_pass(next_ids, captured, positions, attend)
        self._run_on(0, next_ids, y, positions, attend)
        return y if rows is None else y[rows]

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """Run pass `step`, then write its rows' KV for the modules of later passes."""
        y = super().next_pass(step, tokens, hidden, positions, attend)
        self._run_on(step, tokens, y, positions, attend)
        return y

    def _run_on(self, step: int, tokens: Tensor, y: Tensor, positions: Tensor, attend: Attend) -> None:
        """Write the KV of the rows of pass `step`, whose output is y, for the modules of later passes."""
        for later in self._later(step):
            y = self.head(tokens, self.head.feedback(y, later - 1), positions, attend, later)

    def _later(self, step: int) -> range:
        """Passes after `step`: the first pass of each other module."""
        return range(step + 1, min(step + self.head.spec.num_modules, self.max_draft_len))

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one step reads, including modules that run only to write KV for later passes."""
        modules, num = self.head.mtp, self.head.spec.num_modules
        more = [modules[later % num] for step in range(self.max_draft_len) for later in self._later(step)]
        return super().weight_bytes_per_step + sum(map(weight_bytes, more))
