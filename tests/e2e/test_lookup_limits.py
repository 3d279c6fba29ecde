"""Drafters that look tokens up, in an engine: requests for drafts and their answers up to the end of max_seq_len.

Answers are compared with the definitions of tests/unit, cut to TensorRT-LLM's limit for n-gram drafts: a sequence of L
tokens may have max_seq_len - 1 - L of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import Case, Outcome, assert_all_blocks_free, run_alone
from tests.unit.drafting import drafts_of
from tests.unit.test_drafters import brute_force as ngram
from tests.unit.test_ngram_pool import Definition
from tests.unit.test_suffix import brute_force as suffix
from trtspec import LLM, SamplingParams
from trtspec.core import Proposal
from trtspec.protocols import Drafter, DraftRequest

K, MAX_SEQ_LEN = 4, 40
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPT = [3, 4, 5, 6, 7, 3, 4, 5, 8, 9, 3, 4, 5]


class Noted:
    """A drafter that records the requests for drafts and its answers."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.asked: list[tuple[list[int], int]] = []  # tokens, most drafts
        self.answered: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        self.asked += [(list(request.tokens), request.max_draft_len) for request in requests]
        self.answered += drafts_of(proposal)
        return proposal

    def forget(self, request_id: int) -> None:
        self.inner.forget(request_id)


Lookup = Callable[[list[int], int], list[int]]
"""(tokens, most drafts) -> drafts. Calls are for one request, in order."""


def pool(oldest: bool, keep_all: bool, public: bool) -> Callable[[], Lookup]:
    def begin() -> Lookup:
        definition = Definition(1, 3, K, oldest, keep_all, public)
        return lambda tokens, most: definition.drafts(0, tokens, most)

    return begin


WAYS: dict[str, tuple[dict[str, Any], Callable[[], Lookup]]] = {
    "ngram, earliest": (NGRAM, lambda: lambda tokens, most: ngram(tokens, 1, 3, False, most)),
    "ngram, latest": (
        {**NGRAM, "prompt_lookup_latest": True},
        lambda: lambda tokens, most: ngram(tokens, 1, 3, True, most),
    ),
    "public pool": ({**NGRAM, "is_public_pool": True}, pool(True, True, True)),
    "private pool": ({**NGRAM, "is_public_pool": False, "is_keep_all": False}, pool(True, False, False)),
    "pool, newest": ({**NGRAM, "is_public_pool": True, "prompt_lookup_latest": True}, pool(False, True, True)),
    "suffix": (
        {"method": "suffix", "suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": 2.0},
        lambda: lambda tokens, most: suffix([], tokens, most, 8, 2.0, 0.1),
    ),
}


@pytest.mark.parametrize("limit", ["max_seq_len", "max_model_len", "max_tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_end_where_the_sequence_does(target: Path, way: str, limit: str) -> None:
    """Drafts are those of the definition up to the last step or to max_model_len, and never more than fit."""
    fields, begin = WAYS[way]
    more = 5 if limit == "max_model_len" else 0  # tokens of the request after the last draft
    most_tokens = None if limit == "max_seq_len" else MAX_SEQ_LEN + more - len(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=most_tokens, ignore_eos=True)
    max_seq_len = MAX_SEQ_LEN if limit == "max_seq_len" else 100
    with LLM(target, max_seq_len=max_seq_len) as llm:
        expected = run_alone(llm.engine, [Case(PROMPT, params)])
    speculation = {**fields, "num_speculative_tokens": K, **({"max_model_len": MAX_SEQ_LEN} if more else {})}
    llm = LLM(target, speculation, max_seq_len=max_seq_len)
    proposer: Any = llm.engine.loop.proposer
    noted = proposer.drafter = Noted(proposer.drafter)
    (request,) = llm.engine.add_request(PROMPT, params)
    lengths = []  # after each step but the last
    while llm.engine.step() and not request.finished:
        lengths.append(len(request.tokens))
    assert [Outcome.of(request)] == expected
    assert len(request.tokens) == MAX_SEQ_LEN + more
    assert_all_blocks_free(llm)

    fitting = [(length, min(K, MAX_SEQ_LEN - 1 - length)) for length in lengths if length < MAX_SEQ_LEN - 1]
    assert [(len(tokens), most) for tokens, most in noted.asked] == fitting
    lookup = begin()
    assert noted.answered == [lookup(tokens, most) for tokens, most in noted.asked]
    assert any(most < K for _, most in noted.asked)


def test_a_draft_that_would_reach_the_end_is_never_made(target: Path) -> None:
    """With one token left there is nothing to draft: it comes from the target alone."""
    fields, _ = WAYS["ngram, earliest"]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for max_tokens in range(1, 4):
        llm = LLM(target, {**fields, "num_speculative_tokens": K})
        proposer: Any = llm.engine.loop.proposer
        noted = proposer.drafter = Noted(proposer.drafter)
        run_alone(llm.engine, [Case(PROMPT, dataclasses.replace(params, max_tokens=max_tokens))])
        assert all(most <= max_tokens - 2 for _, most in noted.asked)
        assert bool(noted.asked) == (max_tokens > 2)
