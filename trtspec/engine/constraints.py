"""Builds a step's LogitConstraints: penalties, biases and allow-masks that depend on the tokens before each logits row.

Row j of a generation follows its first j drafts, so its constraints include those drafts. The target draws there what
it would draw if it had generated the drafts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trtspec.config.tree import Tree
from trtspec.core import LogitConstraints
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch

_INTS, _FLOATS = torch.empty(0, dtype=torch.int32), torch.empty(0)


class _Row(NamedTuple):
    """A logits row of a request.

    num_before: number of tokens before the one it draws, `drafts` included, which are the last of them.
    """

    request: Request
    num_before: int
    drafts: Sequence[int] = ()


def logit_constraints(batch: Batch, tree: Tree | None = None) -> LogitConstraints | None:
    """The constraints of the R logits rows of a step. None: no request has any, or wants log-probabilities.

    tree: the shape of the drafts; None = chains.
    """
    if not any(row.request.needs_host for row in batch):
        return None
    rows = [_Row(row.request, row.end) for row in batch if row.is_context]
    for request, _, num_drafts, is_context in batch:
        if not is_context:
            before: list[list[int]] = [[]]  # of each row, the drafts before it
            for draft, parent in zip(request.drafts[:num_drafts], parents_of(request, tree), strict=False):
                before.append([*before[parent + 1], draft])
            rows += [_Row(request, len(request.tokens) + len(drafts), drafts) for drafts in before]
    history, prompt_lens, penalties = _penalties(rows)
    bias_ids, bias_values = _biases(rows)
    return LogitConstraints(history, prompt_lens, penalties, bias_ids, bias_values, _mask(batch, tree))


def parents_of(request: Request, tree: Tree | None) -> Sequence[int]:
    """The draft before each of the request's drafts, -1 = the last token. There may be more of them than drafts."""
    if tree is None:
        return range(-1, len(request.drafts) - 1)
    return tree.parents_for(request.draft_parents)


def _penalties(rows: Sequence[_Row]) -> tuple[Tensor, Tensor, Tensor]:
    """history [R, L] int32, prompt_lens [R] int64 and penalties [R, 3] fp32."""
    penalised = {id(row.request): row.request for row in rows if row.request.sampling.is_penalised}
    if not penalised:
        return _INTS, _INTS.long(), _FLOATS
    tokens = {key: np.frombuffer(one.int32_tokens(), np.int32) for key, one in penalised.items()}
    history = np.full((len(rows), max(row.num_before for row in rows if id(row.request) in tokens)), -1, np.int32)
    for r, (request, num_before, drafts) in enumerate(rows):
        if id(request) in tokens:
            own = tokens[id(request)][:num_before]
            history[r, : len(own)] = own
            history[r, len(own) : num_before] = drafts
    asked = [row.request.sampling for row in rows]
    values = [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in asked]
    return (
        torch.from_numpy(history),
        torch.tensor([row.request.prompt_len for row in rows]),
        torch.tensor(values, dtype=torch.float32),
    )


def _biases(rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
    """bias_ids [R, M] int32, -1 padded, and bias_values [R, M] fp32."""
    biases = [row.request.sampling.logit_bias for row in rows]
    width = max(map(len, biases))
    if width == 0:
        return _INTS, _FLOATS
    ids, values = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), np.float32)
    arrays = {id(bias): np.array(bias) for bias in biases if bias}  # [M, 2] each, made once for a request's rows
    for r, bias in enumerate(biases):
        if bias:
            ids[r, : len(bias)], values[r, : len(bias)] = arrays[id(bias)].T
    return torch.from_numpy(ids), torch.from_numpy(values)


def _mask(batch: Batch, tree: Tree | None) -> Tensor:
    """allow_mask [R, ceil(V/32)] int32. Rows of a request without a guide, and those of no use, allow everything."""
    num_words = max(0 if row.request.guide is None else row.request.guide.num_words for row in batch)
    if num_words == 0:
        return _INTS
    sizes = [row.draft_len + 1 for row in batch]
    mask = torch.full((sum(sizes), num_words), -1, dtype=torch.int32)
    for row, part in zip(batch, torch.split(mask, sizes), strict=True):
        if row.request.guide is not None and row.emits:
            drafts = [] if row.is_context else row.request.drafts[: row.draft_len]
            row.request.guide.fill(part, drafts, parents_of(row.request, tree))
    return mask
