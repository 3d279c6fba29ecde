"""Suffix decoding against its definition, which counts n-grams in plain lists."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafting import drafts_of, question
from trtspec.methods.suffix import drafter as suffix
from trtspec.methods.suffix.drafter import ABSORBED_PER_CALL, ABSORBED_PER_REQUEST, TOKENS_PER_RESPONSE, SuffixDrafter
from trtspec.methods.suffix.tree import SuffixTree

Scored = tuple[Fraction, list[int]]

# -- the definition ----------------------------------------------------------------------------------------------------


class Counted:
    """Number of times that every string of up to `depth` tokens occurs in some texts."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int) -> None:
        self.depth = depth
        self.counts = Counter(
            tuple(text[i : i + n]) for text in texts for n in range(1, depth + 1) for i in range(len(text) - n + 1)
        )
        self.vocab = sorted({token for text in texts for token in text})

    def after(self, match: Sequence[int]) -> Counter[tuple[int, ...]]:
        """Return the counts of the strings that begin with a match."""
        return self.counts

    def follow(self, match: Sequence[int], budget: int, min_prob: float) -> Scored:
        """Return (sum of probabilities, drafts) after a match that occurs."""
        seen = self.after(match)
        total, score, drafts = seen[tuple(match)], Fraction(0), list[int]()
        for _ in range(min(budget, self.depth - len(match))):
            counts = {token: seen[(*match, *drafts, token)] for token in self.vocab}
            token = max(self.vocab, key=lambda token: counts[token])  # the first, so the lowest, of equals
            if counts[token] == 0 or counts[token] / total < min_prob:
                break
            drafts.append(token)
            score += Fraction(counts[token], total)
        return score, drafts

    def best(self, tokens: Sequence[int], K: int, factor: float, min_prob: float) -> Scored:
        best: Scored = Fraction(0), []
        for match_len in range(1, min(self.depth, len(tokens)) + 1):
            match = tokens[-match_len:]
            if not self.counts[tuple(match)]:
                break
            found = self.follow(match, min(K, int(match_len * factor + 1e-6)), min_prob)
            if found[0] >= best[0]:
                best = found
        return best


class CountedLatest(Counted):
    """A request's own text: of each match, the latest `most` occurrences count, and the one at the end."""

    def __init__(self, text: Sequence[int], depth: int, most: int) -> None:
        super().__init__([text], depth)
        self.text, self.most = text, most

    def after(self, match: Sequence[int]) -> Counter[tuple[int, ...]]:
        n = len(match)
        starts = [i for i in range(len(self.text) - n + 1) if self.text[i : i + n] == match][-self.most - 1 :]
        return Counter(tuple(self.text[i:end]) for i in starts for end in range(i + n, len(self.text) + 1))


def brute_force(
    past: Sequence[Sequence[int]], tokens: Sequence[int], K: int, depth: int, factor: float, min_prob: float
) -> list[int]:
    own = CountedLatest(tokens, depth, suffix.MOST_OCCURRENCES).best(tokens, K, factor, min_prob)
    shared = Counted(past, depth).best(tokens, K, factor, min_prob)
    return own[1] if own[0] >= shared[0] else shared[1]


def kept(responses: Sequence[Sequence[int]], most: int, most_tokens: int) -> list[list[int]]:
    """Responses that are kept, of all so far.

    Each takes one more place, for its end. A response that is too long keeps its last tokens.
    """
    texts = [list(response[-(most_tokens - 1) :]) for response in responses]
    while len(texts) > most or sum(len(text) + 1 for text in texts) > most_tokens:
        texts.pop(0)
    return texts


# Few different tokens, and pieces that repeat: other texts would hardly ever match.
PIECES = st.sampled_from([[0], [1], [2], [0, 1, 2], [1, 1, 1, 1], [2, 0, 2, 0, 2], [0, 1, 0, 2, 1, 0, 2, 2]])
TEXT = st.lists(PIECES, min_size=1, max_size=8).map(lambda pieces: [token for piece in pieces for token in piece])
DEPTH = st.integers(1, 9)
FACTOR = st.sampled_from([0.0, 0.4, 1.0, 1.5, 3.0])
MIN_PROB = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.6, 1.0])
MOST = st.integers(1, 4)
MOST_TOKENS = st.integers(10, 60)
OCCURRENCES = st.sampled_from([1, 2, 5, 256])


# -- the tree ----------------------------------------------------------------------------------------------------------


def consume(steps: Iterator[None]) -> int:
    return sum(1 for _ in steps)


def check_structure(tree: SuffixTree) -> None:
    """Check the structure of a tree.

    Records are where windows part or equal windows end. The counts of children sum to that of their parent. No record
    and no place is lost.
    """
    rows, live, places, stack = tree._rows, 0, 0, [(0, 0)]
    while stack:
        node, depth = stack.pop()
        live, places = live + 1, places + rows._room[node]
        children = [child for _, child in rows.items(node)]
        counts = [1 if child < 0 else tree._count[child] for child in children]
        assert all(count > 0 for count in counts)
        assert len(children) <= rows._room[node] <= max(2, 4 * len(children))
        if node and children:
            assert len(children) > 1
            assert sum(counts) == tree._count[node]
        for child in children:
            if child >= 0:
                assert tree._length[child] > depth
                stack.append((child, tree._length[child]))
    assert live + len(tree._free) == len(tree._count)
    assert places + sum(room * len(starts) for room, starts in rows._free.items()) == len(rows.tokens)


@given(st.lists(TEXT, max_size=12), TEXT, DEPTH, MOST, MOST_TOKENS, MIN_PROB, st.integers(1, 9))
def test_the_tree_counts_what_brute_force_counts(
    responses: list[list[int]],
    tokens: list[int],
    depth: int,
    most: int,
    most_tokens: int,
    min_prob: float,
    budget: int,
) -> None:
    """Each match and what follows it are those of brute force.

    This holds after every response, even one that evicts others.
    """
    tree = SuffixTree(depth, most, most_tokens)
    for i, response in enumerate(responses):
        consume(tree.absorb(response))
        check_structure(tree)
        texts = kept(responses[: i + 1], most, most_tokens)
        counted = Counted(texts, depth)
        assert len(tree._responses) == len(texts)
        pattern = array("i", tokens[-depth:])
        for n in range(1, len(pattern) + 1):
            total = counted.counts[tuple(pattern[-n:])]
            found = tree.locate(pattern[-n:])
            assert (found is not None) == (total > 0)
            if found is not None:
                guess = tree.draft(found, n, budget, min_prob)
                assert guess.total == total
                expected = counted.follow(pattern[-n:], budget, min_prob)
                assert (Fraction(guess.count, guess.total), guess.tokens) == expected


def test_a_tree_that_everything_left_is_as_small_as_a_new_one() -> None:
    rng = random.Random(0)
    tree = SuffixTree(12, 3, 400)
    for _ in range(30):
        consume(tree.absorb([rng.randrange(3) for _ in range(rng.randrange(1, 100))]))
    for token in (5, 6, 7):
        consume(tree.absorb([token]))
    check_structure(tree)
    assert len(tree._count) - len(tree._free) == 1
    assert [tree.locate(array("i", [token])) is None for token in range(8)] == [True] * 5 + [False] * 3


def test_memory_does_not_grow_with_what_passes_through() -> None:
    """Memory does not grow as responses pass through, one after another.

    The responses are far longer than the tree holds, and have 2 to 50 different tokens.
    """
    rng = random.Random(1)
    tree, sizes = SuffixTree(16, 8, 1000), []
    for vocab in (50, 2, 7, 50, 2, 7, 50):
        for length in (2000, 100, 300, 700):
            consume(tree.absorb([rng.randrange(vocab) for _ in range(length)]))
            assert len(tree._count) <= 2 * 1000 + 1
        sizes.append(tree.nbytes)
    assert max(sizes) < 200 * 1000
    assert sizes[-1] < 1.1 * sizes[2]


# -- the drafter -------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    """Events of up to 16 requests: ("start", id, prompt), ("grow", id, new tokens), ("end", id, [])."""
    events: list[tuple[str, int, list[int]]] = []
    running: list[int] = []
    for _ in range(draw(st.integers(1, 16))):
        kind = draw(st.sampled_from(["start", "grow", "grow", "end"])) if running else "start"
        if kind == "start":
            running.append(sum(event == "start" for event, _, _ in events))
            events.append((kind, running[-1], draw(TEXT)))
        else:
            chosen = draw(st.sampled_from(running))
            events.append((kind, chosen, draw(TEXT) if kind == "grow" else []))
            if kind == "end":
                running.remove(chosen)
    return events


@given(histories(), DEPTH, MOST, MOST_TOKENS, FACTOR, MIN_PROB, st.integers(1, 9), OCCURRENCES)
def test_drafts_equal_brute_force(
    events: list[tuple[str, int, list[int]]],
    depth: int,
    most: int,
    most_tokens: int,
    factor: float,
    min_prob: float,
    K: int,
    occurrences: int,
) -> None:
    """Drafts are those of brute force for requests that run together, in one call.

    Ended requests are found by the others.
    """
    with mock.patch.object(suffix, "MOST_OCCURRENCES", occurrences):
        shared = SuffixDrafter(depth, SuffixTree(depth, most, most_tokens), factor, min_prob)
        lonely = SuffixDrafter(depth, None, factor, min_prob)
        running: dict[int, tuple[int, list[int]]] = {}  # id -> (prompt length, tokens)
        ended: list[list[int]] = []
        for kind, request, tokens in events:
            if kind == "start":
                running[request] = len(tokens), [*tokens, 0]
            elif kind == "grow":
                running[request][1].extend(tokens)
            else:
                prompt_len, known = running.pop(request)
                ended.append(known[prompt_len:])
                shared.forget(request)
                lonely.forget(request)
            asked = [
                question(known, 1 + (K + i) % K, i, prompt_len=prompt_len) for i, (prompt_len, known) in running.items()
            ]
            if not asked:
                continue
            for drafter, past in ((shared, kept(ended, most, most_tokens)), (lonely, [])):
                expected = [brute_force(past, one.tokens, one.max_draft_len, depth, factor, min_prob) for one in asked]
                assert drafts_of(drafter.propose(asked)) == expected


class Read(np.ndarray):  # type: ignore[type-arg]
    """An array that counts the elements that are read from it."""

    count = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = self.view(np.ndarray)[key]
        Read.count += np.size(found)
        return found


@pytest.mark.parametrize("period", [1, 2, 7])
def test_repetitive_text_costs_a_pass_over_its_tokens(period: int) -> None:
    read = []
    for length in (7000, 14000):
        text = np.pad(np.arange(length) % period, 24, constant_values=-1)
        Read.count = 0
        guess, match_len = suffix.choose(
            suffix.OwnText(text.view(Read), 24, 0.1), suffix.match_lengths(24, 8, 1.0), suffix.Guess()
        )
        assert guess.tokens == [(length + i) % period for i in range(8)]
        assert match_len == 16
        assert guess.total <= suffix.MOST_OCCURRENCES + 1
        read.append(Read.count)
    assert read[1] - read[0] <= 2 * 7000


def drafter(depth: int = 24, responses: int = 10, factor: float = 1.0, min_prob: float = 0.1) -> SuffixDrafter:
    tree = SuffixTree(depth, responses, responses * TOKENS_PER_RESPONSE) if responses else None
    return SuffixDrafter(depth, tree, factor, min_prob)


def told(drafter: SuffixDrafter, *responses: list[int]) -> SuffixDrafter:
    """Return the drafter after requests with a prompt of one token, 9, had these responses."""
    for i, response in enumerate(responses):
        drafter.propose([question([9, *response], 1, 1000 + i, prompt_len=1)])
        drafter.forget(1000 + i)
    return drafter


def ask(drafter: SuffixDrafter, tokens: list[int], K: int = 8) -> list[int]:
    (drafts,) = drafts_of(drafter.propose([question(tokens, K, prompt_len=len(tokens))]))
    drafter.forget(0)
    return drafts


def test_the_most_frequent_continuation_wins_and_the_lowest_id_of_equals() -> None:
    assert ask(told(drafter(), [1, 2, 5], [1, 2, 4], [1, 2, 5]), [7, 1, 2]) == [5]
    assert ask(told(drafter(), [1, 2, 5], [1, 2, 4], [1, 2, 6]), [7, 1, 2]) == [4]


def test_as_many_drafts_as_the_match_and_the_factor_allow() -> None:
    past = [1, 2, 3, 4, 5, 6, 7, 8]
    assert ask(told(drafter(), past), [2, 3]) == [4, 5]
    assert ask(told(drafter(factor=2.0), past), [2, 3]) == [4, 5, 6, 7]
    assert ask(told(drafter(factor=2.0), past), [2, 3], K=3) == [4, 5, 6]
    assert ask(told(drafter(factor=2.0, depth=5), past), [2, 3]) == [4, 5, 6]  # match and drafts are 5 tokens
    assert ask(told(drafter(factor=0.4), past), [2, 3]) == []


def test_drafts_end_where_they_become_improbable() -> None:
    past = ([1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4])
    assert ask(told(drafter(factor=5.0, min_prob=0.5), *past), [1, 2]) == [3]  # 2/3, then 1/3
    assert ask(told(drafter(factor=5.0, min_prob=0.3), *past), [1, 2]) == [3, 5]


def test_prompts_are_not_shared() -> None:
    kept = told(drafter())
    kept.propose([question([1, 2, 3, 4], 2, 7, prompt_len=3)])
    kept.forget(7)
    assert ask(kept, [1, 2]) == []
    assert ask(kept, [8, 4]) == []  # the whole response, which nothing follows


def test_without_cached_requests_only_the_requests_own_text_counts() -> None:
    alone = told(drafter(responses=0), [1, 2, 3])
    assert ask(alone, [1, 2]) == []
    assert ask(alone, [1, 2, 3, 8, 1, 2]) == [3, 8]


def test_a_request_that_ends_unheard_leaves_nothing() -> None:
    kept = drafter()
    kept.forget(5)
    assert ask(kept, [1, 2]) == []


def test_the_oldest_response_leaves_first() -> None:
    kept = told(drafter(responses=2), [1, 2, 3], [4, 5, 6], [7, 8, 0])
    assert [ask(kept, [1, 2]), ask(kept, [4, 5]), ask(kept, [7, 8])] == [[], [6], [0]]


def test_a_long_response_comes_in_over_several_calls() -> None:
    """A long response is added over several calls, so that it delays no request.

    The part that is added counts already.
    """
    response = list(range(100, 100 + 4 * ABSORBED_PER_CALL))
    calls = -(-len(response) // (ABSORBED_PER_CALL + ABSORBED_PER_REQUEST))
    kept = told(drafter(responses=2), response)
    assert [ask(kept, response[-4:-2]) for _ in range(calls)] == [[]] * (calls - 1) + [response[-2:]]
    kept = told(drafter(responses=2), response)
    assert [ask(kept, response[:2]) for _ in range(calls)] == [response[2:4]] * calls


def test_no_more_waits_than_the_tree_may_hold() -> None:
    kept = drafter(responses=2)
    for i in range(20):
        kept._responses[i] = array("i", range(TOKENS_PER_RESPONSE + i))
        kept.forget(i)
    assert list(kept._ended) == [array("i", range(TOKENS_PER_RESPONSE + 19))]
