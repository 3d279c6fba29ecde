"""Prompt lookup: what followed the last n tokens when they occurred before is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import Proposal
from trtspec.methods.drafter import DraftModel
from trtspec.methods.history import TokenHistory, proposal_of
from trtspec.methods.ngram.options import NGramOptions
from trtspec.methods.ngram.pool import NGramPoolDrafter
from trtspec.protocols import Drafter, DraftRequest


class NGramDrafter:
    """Longest n in [smallest, largest] first; of its occurrences the earliest, or the latest if `latest`.

    An occurrence may overlap the suffix it equals. Up to K tokens behind it are copied, cut where the context ends.
    """

    def __init__(self, smallest: int, largest: int, latest: bool = False) -> None:
        self.smallest, self.largest, self.latest = smallest, largest, latest
        self._history = TokenHistory()

    @classmethod
    def of(cls, speculation: SpeculationPlan, model: DraftModel | None = None, max_num_tokens: int = 0) -> Drafter:
        """As the settings say. A pool, where they ask for one, has a drafter of its own."""
        options = cast("NGramOptions", speculation.options)
        if options.is_public_pool is not None:
            return NGramPoolDrafter.of(options, speculation.num_speculative_tokens)
        return cls(options.prompt_lookup_min, options.prompt_lookup_max, options.prompt_lookup_latest)

    def forget(self, request_id: int) -> None:
        """Drop the copy of the request's tokens."""
        self._history.forget(request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See protocols.Drafter."""
        return proposal_of(requests, [self.lookup(self._history.update(request)) for request in requests])

    def lookup(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """All tokens behind the chosen earlier occurrence of the suffix of `tokens` [L]; empty where there is none."""
        L = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last index of every occurrence of the suffix, n = 1
        best = ends[:0]
        for n in range(1, min(self.largest, L - 1) + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[tokens[ends - n + 1] == tokens[L - n]]
            if not len(ends):
                break
            if n >= self.smallest:
                best = ends
        if not len(best):
            return tokens[:0]
        return tokens[best[-1 if self.latest else 0] + 1 :]
