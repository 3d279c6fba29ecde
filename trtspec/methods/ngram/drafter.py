"""Prompt lookup: tokens that followed an earlier occurrence of the last n tokens are likely to follow again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import Proposal
from trtspec.methods.drafter import DraftModel
from trtspec.methods.history import TokenHistory, TokenTree, proposal_of, proposal_of_trees
from trtspec.methods.ngram.options import NGramOptions
from trtspec.methods.ngram.pool import NGramPoolDrafter
from trtspec.protocols import Drafter, DraftRequest

MATCHES_PER_DRAFT = 4
"""Number of occurrences of an n-gram that are merged into a tree, for each of its drafts; most bring nothing new."""


class NGramDrafter:
    """A drafter that copies the tokens after an earlier occurrence of the last n tokens.

    It takes the longest n in [smallest, largest] that has an occurrence, and the earliest of these, or the latest if
    `latest`. An occurrence may overlap the suffix it equals. Up to K tokens after it are copied, or fewer where the
    context ends. A tree goes on with what follows the other occurrences, those of a longer n first.
    """

    def __init__(self, smallest: int, largest: int, latest: bool = False) -> None:
        self.smallest, self.largest, self.latest = smallest, largest, latest
        self._history = TokenHistory()

    @classmethod
    def of(cls, speculation: SpeculationPlan, model: DraftModel | None = None, max_num_tokens: int = 0) -> Drafter:
        """Return the drafter of these options: an NGramPoolDrafter if they ask for a pool."""
        options = cast("NGramOptions", speculation.options)
        if options.is_public_pool is not None:
            return NGramPoolDrafter.of(options, speculation.num_speculative_tokens)
        return cls(options.prompt_lookup_min, options.prompt_lookup_max, options.prompt_lookup_latest)

    def forget(self, request_id: int) -> None:
        """Drop the copy of the request's tokens."""
        self._history.forget(request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return for each request, in order, the tokens that were looked up, at most max_draft_len."""
        if requests[0].max_depth is not None:
            return proposal_of_trees(requests, [self._tree(request) for request in requests])
        return proposal_of(requests, [self.lookup(self._history.update(request)) for request in requests])

    def lookup(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """All tokens after the chosen earlier occurrence of the suffix of `tokens` [L]; empty if there is none."""
        ends = next(self._occurrences(tokens), None)
        return tokens[:0] if ends is None else tokens[ends[0] + 1 :]

    def _tree(self, request: DraftRequest) -> TokenTree:
        """Merge what follows each occurrence, in the order of preference: that of the chain first."""
        tokens, tree = self._history.update(request), TokenTree(request.max_draft_len)
        for ends in self._occurrences(tokens):
            for end in ends[: MATCHES_PER_DRAFT * request.max_draft_len].tolist():
                if tree.is_full:
                    return tree
                tree.add(tokens[end + 1 : end + 1 + (request.max_depth or 0)].tolist())
        return tree

    def _occurrences(self, tokens: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Last indices of earlier occurrences of the last n tokens of `tokens` [L], for each n, the longest n first.

        Of one n they are in the order of preference. An occurrence of a longer n is one of the shorter n, too.
        """
        L = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # n = 1
        found = []
        for n in range(1, min(self.largest, L - 1) + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[tokens[ends - n + 1] == tokens[L - n]]
            if not len(ends):
                break
            if n >= self.smallest:
                found.append(ends)
        for ends in reversed(found):
            yield ends[::-1] if self.latest else ends
