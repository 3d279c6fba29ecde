"""Checks of what a drafter returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.core import Proposal
from trtspec.errors import EngineError
from trtspec.protocols import DraftRequest


def checked_proposal(
    proposal: Proposal, questions: Sequence[DraftRequest], vocab_size: int
) -> list[tuple[list[int], Sequence[int], Sequence[float], int]]:
    """Drafts, the parents and the score of each, and valid draft KV rows of each request.

    EngineError says what is wrong with the proposal.
    """
    if not isinstance(proposal, Proposal):
        raise EngineError(f"propose() returned a {type(proposal).__name__}; it is to return a trtspec.core.Proposal")
    B = len(questions)
    tokens = _integers("draft_tokens", proposal.draft_tokens, B, dims=2).tolist()
    lengths = _integers("draft_lens", proposal.draft_lens, B).tolist()
    kv_lens = [question.draft_kv_len for question in questions]
    if proposal.draft_kv_lens is not None:
        kv_lens = _integers("draft_kv_lens", proposal.draft_kv_lens, B).tolist()
    shapes: list[Sequence[int]] = [range(-1, len(row) - 1) for row in tokens]
    if proposal.draft_parents is not None:
        if questions[0].max_depth is None:
            raise EngineError("the drafter gave draft_parents; leave them unset, as this engine verifies chains")
        shapes = _integers("draft_parents", proposal.draft_parents, B, dims=2).tolist()
    scores = _scores(proposal.draft_scores, tokens)
    answers = []
    for row, shape, length, judged, kv_len, question in zip(
        tokens, shapes, lengths, scores, kv_lens, questions, strict=True
    ):
        most = min(question.max_draft_len, len(row))
        if not 0 <= length <= most:
            raise EngineError(f"the drafter gave draft_len {length}; allowed are 0..{most}")
        drafts = row[:length]
        if drafts and not 0 <= min(drafts) <= max(drafts) < vocab_size:
            raise EngineError(f"the drafter proposed {drafts}; token ids are 0..{vocab_size - 1}")
        known = len(question.tokens) + length
        if not 0 <= kv_len <= known:
            raise EngineError(f"the drafter gave draft_kv_len {kv_len}; allowed are 0..{known}")
        parents = shape[:length]
        if len(parents) < length or any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise EngineError(
                f"the drafter gave draft_parents {list(parents)} of {length} drafts; a parent comes first"
            )
        answers.append((drafts, parents, judged[:length], kv_len))
    return answers


def _scores(value: object, tokens: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
    """Scores of the drafts of each request; EngineError if core.Proposal does not allow `value`."""
    if value is None:
        return [()] * len(tokens)
    wanted = [len(tokens), len(tokens[0])]
    if isinstance(value, Tensor) and value.is_floating_point() and list(value.shape) == wanted:
        return value.nan_to_num(0.0).tolist()
    got = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise EngineError(f"the drafter gave draft_scores {got}; want a floating-point tensor {wanted}, or None")


def _integers(name: str, value: object, rows: int, dims: int = 1) -> Tensor:
    """Return `value` if core.Proposal allows its type, dtype and shape, else raise EngineError."""
    got = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        if value.dtype in (torch.int64, torch.int32) and value.dim() == dims and value.shape[0] == rows:
            return value
        got = f"{list(value.shape)} {value.dtype}"
    wanted = f"[{rows}, K]" if dims == 2 else f"[{rows}]"
    raise EngineError(f"the drafter gave {name} {got}; for {rows} requests it is a tensor {wanted} of int64 or int32")
