"""Shared code of host-side drafters: tokens of running requests as arrays, and proposals from lists of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.core import Proposal
from trtspec.protocols import DraftRequest


class TokenHistory:
    """The tokens of every request as an array; each call copies only tokens that are new since the last call.

    `margin` elements before and after the tokens hold -1, so that windows around a token need no check for the ends.
    """

    def __init__(self, margin: int = 0) -> None:
        self.margin = margin
        self._rows: dict[int, NDArray[np.int64]] = {}  # request id -> margin, tokens, spare capacity
        self._lengths: dict[int, int] = {}

    def update(self, request: DraftRequest) -> NDArray[np.int64]:
        """Return a view of the request's tokens [L] with the margins around them, [margin + L + margin]."""
        length, old = len(request.tokens), self._lengths.get(request.request_id, 0)
        row, margin = self._rows.get(request.request_id), self.margin
        if row is None or len(row) < length + 2 * margin:
            grown = np.full(2 * length + 2 * margin, -1, dtype=np.int64)
            if row is not None:
                grown[: margin + old] = row[: margin + old]
            row = self._rows[request.request_id] = grown
        row[margin + old : margin + length] = request.tokens[old:length]
        self._lengths[request.request_id] = length
        return row[: length + 2 * margin]

    def forget(self, request_id: int) -> None:
        self._rows.pop(request_id, None)
        self._lengths.pop(request_id, None)


def proposal_of(requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int] | NDArray[np.int64]]) -> Proposal:
    """Make a Proposal of one list of drafts per request, each cut to the request's max_draft_len."""
    rows = np.zeros((len(requests), max(request.max_draft_len for request in requests)), dtype=np.int64)
    lengths = np.zeros(len(requests), dtype=np.int32)
    for b, (request, found) in enumerate(zip(requests, drafts, strict=True)):
        lengths[b] = min(len(found), request.max_draft_len)
        rows[b, : lengths[b]] = found[: lengths[b]]
    return Proposal(torch.from_numpy(rows), torch.from_numpy(lengths))


class TokenTree:
    """Guesses of one request, merged into a tree of at most `most` drafts. Drafts come after their parents."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 = the last token
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> draft

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == self.most

    def add(self, guess: Sequence[int]) -> None:
        """Add the drafts of a chain that are new, as many as there is room for."""
        node = -1
        for token in guess:
            child = self.child(node, token)
            if child is None:
                return
            node = child

    def child(self, parent: int, token: int) -> int | None:
        """The draft `token` after the draft `parent`, which is added if it is new; None if there is no room for it."""
        known = self._nodes.get((parent, token))
        if known is not None or self.is_full:
            return known
        self._nodes[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


def proposal_of_trees(requests: Sequence[DraftRequest], trees: Sequence[TokenTree]) -> Proposal:
    """Make a Proposal of one tree per request."""
    shape = len(requests), max(request.max_draft_len for request in requests)
    rows, parents = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    for b, tree in enumerate(trees):
        rows[b, : len(tree.tokens)] = tree.tokens
        parents[b, : len(tree.tokens)] = tree.parents
    lengths = torch.tensor([len(tree.tokens) for tree in trees], dtype=torch.int32)
    return Proposal(torch.from_numpy(rows), lengths, draft_parents=torch.from_numpy(parents))
