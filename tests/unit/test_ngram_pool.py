"""N-gram lookup in a pool against the definition, which reads whole histories with plain lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafting import drafts_of, question
from trtspec.methods.ngram.pool import NGramPool, NGramPoolDrafter

Pool = dict[tuple[int, ...], list[tuple[int, ...]]]


class Definition:
    """The definition: one list of matches per pattern, ordered by age, from which nothing is ever removed."""

    def __init__(self, smallest: int, largest: int, K: int, oldest: bool, keep_all: bool, public: bool) -> None:
        self.smallest, self.largest, self.K = smallest, largest, K
        self.oldest, self.keep_all, self.public = oldest, keep_all, public
        self.pools: dict[int, Pool] = {}
        self.start: dict[int, int] = {}

    def drafts(self, request: int, tokens: list[int], most: int) -> list[int]:
        pool = self.pools.setdefault(0 if self.public else request, {})
        sequence = tokens[self.start.get(request, 0) :]
        for size in range(min(self.largest, len(tokens) - 1), self.smallest - 1, -1):
            for left in range(len(sequence) - size):
                pattern = tuple(sequence[left : left + size])
                match = tuple(sequence[left + size : left + size + self.K])
                if pattern not in pool:
                    pool[pattern] = [match]
                elif not self.keep_all:
                    if len(match) > len(pool[pattern][0]):
                        pool[pattern] = [match]
                elif match not in pool[pattern]:
                    pool[pattern] = [old for old in pool[pattern] if len(old) >= len(match)] + [match]
        self.start[request] = max(0, len(tokens) - (self.K + self.largest - 1))
        for size in range(min(self.largest, len(tokens) - 1), self.smallest - 1, -1):
            if tuple(tokens[-size:]) in pool:
                return list(pool[tuple(tokens[-size:])][0 if self.oldest else -1][:most])
        return []


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(
    events=st.lists(st.tuples(st.integers(0, 2), TOKENS), min_size=1, max_size=12),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    K=st.integers(1, 5),
    oldest=st.booleans(),
    keep_all=st.booleans(),
    public=st.booleans(),
)
def test_drafts_equal_the_definition(
    events: list[tuple[int, list[int]]], sizes: list[int], K: int, oldest: bool, keep_all: bool, public: bool
) -> None:
    """Drafts equal the definition's for three requests that grow in turn.

    Each step has another limit of drafts, as if near the end of the request.
    """
    smallest, largest = sizes
    definition = Definition(smallest, largest, K, oldest, keep_all, public)
    drafter = NGramPoolDrafter(smallest, largest, K, oldest=oldest, keep_all=keep_all, public=public)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, (request, new) in enumerate(events):
        texts[request] += new
        most = 1 + step % K
        (drafts,) = drafts_of(drafter.propose([question(texts[request], most, request)]))
        assert drafts == definition.drafts(request, texts[request], most)


def drafter(smallest: int = 1, largest: int = 2, K: int = 3, **settings: Any) -> NGramPoolDrafter:
    return NGramPoolDrafter(smallest, largest, K, **settings)


def ask(drafter: NGramPoolDrafter, tokens: list[int], request: int = 0, most: int = 3) -> list[int]:
    (drafts,) = drafts_of(drafter.propose([question(tokens, most, request)]))
    return drafts


def test_a_public_pool_is_shared_and_a_private_one_is_not() -> None:
    public, private = drafter(), drafter(public=False)
    for one in (public, private):
        ask(one, [1, 2, 3, 4], request=0)
    assert ask(public, [9, 1, 2], request=1) == [3, 4]
    assert ask(private, [9, 1, 2], request=1) == []
    for one in (public, private):
        one.forget(0)
    assert ask(public, [1, 2], request=2) == [3, 4]
    assert private._private.keys() == {1}


def test_the_oldest_or_the_newest_match() -> None:
    tokens = [1, 5, 6, 7, 1, 8, 9, 7, 1]
    assert ask(drafter(largest=1), tokens) == [5, 6, 7]
    assert ask(drafter(largest=1, oldest=False), tokens) == [8, 9, 7]
    assert ask(drafter(largest=1, oldest=False, keep_all=False), tokens) == [5, 6, 7]  # the first, as none was longer


def test_a_match_that_the_end_had_cut_is_found_at_full_length_later() -> None:
    one = drafter(largest=1)
    assert ask(one, [1, 2]) == []
    assert ask(one, [1, 2, 1]) == [2, 1]
    assert ask(one, [1, 2, 1, 4, 5, 1]) == [2, 1, 4]


def test_a_longer_pattern_is_tried_first_and_none_shorter_than_allowed() -> None:
    tokens = [2, 8, 1, 2, 9, 1, 2]
    assert ask(drafter(), tokens, most=1) == [9]
    assert ask(drafter(largest=1), tokens, most=1) == [8]
    assert ask(drafter(smallest=2), [2, 8, 3, 2]) == []


def test_drafts_end_where_the_request_does() -> None:
    """Drafts end at the limit that the engine gives. Upstream computes it: max_seq_len - 1 - length."""
    tokens = [1, 2, 3, 4, 5, 1]
    assert [ask(drafter(), tokens, most=most) for most in (1, 2, 3)] == [[2], [2, 3], [2, 3, 4]]


def all_in_a_list(added: list[tuple[int, tuple[int, ...]]], size: int, keep_all: bool) -> list[list[tuple[int, ...]]]:
    """A pool in its simplest form: [pattern, match, match, ...] of each pattern, ordered by age."""
    pool: list[list[tuple[int, ...]]] = []
    for number, match in added:
        known = next((row for row in pool if row[0] == (number,)), None)
        if known is None:
            pool.append([(number,), match])
        elif keep_all and match not in known[1:]:
            known[1:] = [old for old in known[1:] if len(old) >= len(match)] + [match]
        elif not keep_all and len(match) > len(known[1]):
            known[1:] = [match]
        while sum(len(row) - 1 for row in pool) > size:
            pool.pop(0)
    return pool


@given(
    added=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple))),
    size=st.integers(1, 8),
    keep_all=st.booleans(),
)
def test_a_small_pool_keeps_what_a_list_would(
    added: list[tuple[int, tuple[int, ...]]], size: int, keep_all: bool
) -> None:
    """A small pool keeps what a list would keep, also if patterns that were removed come again."""
    pool = NGramPool(size, keep_all)
    for count, (number, match) in enumerate(added, 1):
        pool.add((number,), match)
        expected = all_in_a_list(added[:count], size, keep_all)
        assert len(pool) == sum(len(row) - 1 for row in expected)
        kept = {row[0]: (row[1], row[-1]) for row in expected}
        for i in range(4):
            assert (pool.find((i,), True), pool.find((i,), False)) == kept.get((i,), ((), ()))


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_a_pool_holds_no_more_than_its_size_and_loses_the_oldest_patterns(size: int) -> None:
    pool = NGramPool(size, keep_all=True)
    for i in range(60):
        pool.add((i,), (i,))
        assert len(pool) == min(i + 1, size)
    found = [pool.find((i,), oldest=True) for i in range(60)]
    assert found == [()] * (60 - size) + [(i,) for i in range(60 - size, 60)]


def test_every_match_counts_to_the_size() -> None:
    pool = NGramPool(3, keep_all=True)
    for pattern, match in ((1, 5), (1, 6), (2, 7), (3, 8)):
        pool.add((pattern,), (match,))
    assert (len(pool), pool.find((1,), oldest=True), pool.find((2,), oldest=True)) == (2, (), (7,))


def test_one_pattern_with_too_many_matches_leaves_too() -> None:
    pool = NGramPool(3, keep_all=True)
    for i in range(4):
        pool.add((7,), (i,))
    assert len(pool) == 0
    assert pool.find((7,), oldest=True) == ()
