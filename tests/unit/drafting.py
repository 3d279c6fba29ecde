"""Requests for drafts and the drafts of a proposal, for tests of drafters."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.core import Proposal
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def question(
    tokens: Sequence[int],
    K: int,
    request_id: int = 0,
    sampling: RequestSampling = GREEDY,
    blocks: Sequence[int] = (),
    draft_kv_len: int = 0,
    prompt_len: int = 0,
) -> DraftRequest:
    return DraftRequest(request_id, tokens, K, sampling, blocks, draft_kv_len, prompt_len=prompt_len)


def drafts_of(proposal: Proposal) -> list[list[int]]:
    rows, lengths = proposal.draft_tokens.tolist(), proposal.draft_lens.tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
