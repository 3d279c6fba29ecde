"""The method "grammar": guided requests verify the text that their grammars force, and nothing else is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import Self

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import Proposal
from trtspec.methods.drafter import DraftModel
from trtspec.protocols import DraftRequest


class GrammarDrafter:
    """A drafter without drafts. Those of grammars are added to the drafts of every method (engine.guided_drafts)."""

    @classmethod
    def of(cls, speculation: SpeculationPlan, model: DraftModel | None = None, max_num_tokens: int = 0) -> Self:
        """Return the drafter; it has no options."""
        return cls()

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return no drafts."""
        count = len(requests)
        return Proposal(torch.empty(count, 0, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))

    def forget(self, request_id: int) -> None:
        """Do nothing: there is no state to drop."""
