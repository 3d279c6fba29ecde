"""RepeatLookups: what followed the longest match, next to an exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.spec_plan_cases import decide
from trtspec import SamplingParams
from trtspec.engine.propose import Proposer
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Scheduler
from trtspec.kv.blocks import SequenceKV
from trtspec.methods.ngram import repeats
from trtspec.methods.ngram.repeats import IndexedText, RepeatLookups
from trtspec.sampling_params import RequestSampling


def searched(tokens: list[int], n: int, count: int) -> list[int]:
    """What follows the latest of the longest matches of n tokens or more."""
    last, found = len(tokens), []
    for end in range(n, last):
        length = 0
        while length < min(end, repeats.LONGEST_MATCH) and tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        if length >= n:
            found.append((length, end))
    if not found:
        return []
    _, end = max(found[-repeats.MOST_OCCURRENCES :])
    text = list(tokens)
    for j in range(count):
        text.append(text[end + j])
    return text[last:]


@pytest.mark.parametrize(("occurrences", "longest"), [(32, 64), (3, 5)])
def test_the_longest_match_is_found_however_the_text_grows(
    monkeypatch: pytest.MonkeyPatch, occurrences: int, longest: int
) -> None:
    monkeypatch.setattr(repeats, "MOST_OCCURRENCES", occurrences)
    monkeypatch.setattr(repeats, "LONGEST_MATCH", longest)
    rng, drafted = random.Random(0), 0
    for _ in range(1000):
        n, count = rng.randint(1, 4), rng.randint(1, 7)
        tokens = [rng.randrange(rng.randint(1, 5)) for _ in range(rng.randint(0, 120))]
        text = IndexedText(n)
        while len(text.tokens) < len(tokens):
            text.extend(tokens[len(text.tokens) :][: rng.randint(1, 5)])
        assert text.after_repeat(count) == searched(tokens, n, count)
        drafted += bool(text.after_repeat(count))
    assert 200 < drafted < 1000


def test_a_loop_is_drafted_past_the_end_of_the_text() -> None:
    text = IndexedText(2)
    text.extend([5, 1, 2, 3, 1, 2])
    assert text.after_repeat(7) == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("made", "found", "kept"),
    [([7, 8, 9], [7, 8, 9], 3), ([7, 8, 9], [7, 5, 9], 1), ([7], [7, 8, 9], 1), ([7, 8, 9], [], 3), ([], [5, 6], 0)],
)
def test_draft_kv_of_replaced_drafts_is_dropped(made: list[int], found: list[int], kept: int) -> None:
    """The KV of the first `kept` drafts that the draft layers made counts. Without a lookup, nothing changes."""
    plan = decide({"method": "eagle3", "model": "/models/eagle3", "num_speculative_tokens": 3, "one_engine": True})
    proposer = Proposer(None, plan, vocab_size=10)
    proposer.lookups = Fixed(found)
    request = request_of([0] * 10, made)
    scheduler = SimpleNamespace(running=[request], allocator=SimpleNamespace(block_size=16))
    proposer.propose([request], cast("Scheduler", scheduler))
    assert request.drafts == (found or made)
    assert request.looked_up == bool(found)
    assert request.kv.draft_kv_len == 10 + kept


class Fixed(RepeatLookups):
    """Lookups that find the same drafts everywhere."""

    def __init__(self, found: list[int]) -> None:
        super().__init__(1)
        self.found = found

    def find(self, request_id: int, tokens: Sequence[int], count: int) -> list[int]:
        return self.found[:count]


def request_of(tokens: list[int], drafts: list[int]) -> Request:
    """A request whose draft KV includes that of its drafts."""
    return Request(
        request_id=5,
        tokens=tokens,
        prompt_len=1,
        sampling=RequestSampling.of(SamplingParams(), 0, 1, (), {}),
        length_limit=100,
        min_tokens=0,
        eos_ids=frozenset(),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
        drafts=drafts,
        kv=SequenceKV(blocks=[1], committed=9, draft_kv_len=len(tokens) + len(drafts)),
    )


def test_requests_have_texts_of_their_own() -> None:
    lookups = RepeatLookups(2)
    texts = [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [1, 2]]
    assert [lookups.find(i, text, 3) for i, text in enumerate(texts)] == [[3, 1, 2], [4, 1, 2], []]
    lookups.forget(0)
    assert lookups.find(0, [1, 2], 3) == [], "a request that ended is forgotten"
