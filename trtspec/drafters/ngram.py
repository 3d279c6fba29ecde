"""Prompt lookup: what followed the last n tokens when they occurred before is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.core import DraftRequest, Proposal
from trtspec.drafters.base import DraftResources


class NGramDrafter:
    """Longest n in [smallest, largest] first; of its occurrences the earliest, or the latest if `latest`.

    An occurrence may overlap the suffix it equals. Up to K tokens behind it are copied, cut where the context ends.
    """

    def __init__(self, smallest: int, largest: int, latest: bool = False) -> None:
        self.smallest, self.largest, self.latest = smallest, largest, latest
        self._history: dict[int, NDArray[np.int64]] = {}  # request id -> tokens, with room to grow
        self._lengths: dict[int, int] = {}

    @classmethod
    def from_resources(cls, resources: DraftResources) -> NGramDrafter:
        """See base.BuildableDrafter."""
        spec = resources.speculation
        return cls(spec.prompt_lookup_min, spec.prompt_lookup_max, spec.prompt_lookup_latest)

    def forget(self, request_id: int) -> None:
        """Drop the copy of the request's tokens."""
        self._history.pop(request_id, None)
        self._lengths.pop(request_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See core.Drafter."""
        found = [self.lookup(self._tokens(request))[: request.max_draft_len] for request in requests]
        K = max(request.max_draft_len for request in requests)
        drafts = torch.zeros(len(requests), K, dtype=torch.int64)
        for b, continuation in enumerate(found):
            drafts[b, : len(continuation)] = torch.from_numpy(continuation)
        return Proposal(drafts, torch.tensor([len(continuation) for continuation in found], dtype=torch.int32))

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

    def _tokens(self, request: DraftRequest) -> NDArray[np.int64]:
        """The request's tokens as an array; only those new since the last call are copied."""
        length, old = len(request.tokens), self._lengths.get(request.request_id, 0)
        history = self._history.get(request.request_id)
        if history is None or len(history) < length:
            grown = np.empty(2 * length, dtype=np.int64)
            if history is not None:
                grown[:old] = history[:old]
            history = self._history[request.request_id] = grown
        history[old:length] = request.tokens[old:length]
        self._lengths[request.request_id] = length
        return history[:length]
