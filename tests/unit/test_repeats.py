"""RepeatLookups: what followed the longest match, next to an exhaustive search."""

from __future__ import annotations

import random

from trtspec.methods.ngram.repeats import LONGEST_MATCH, MOST_OCCURRENCES, IndexedText, RepeatLookups


def searched(tokens: list[int], n: int, count: int) -> list[int]:
    """What follows the latest of the longest matches of n tokens or more."""
    last, found = len(tokens), []
    for end in range(n, last):
        length = 0
        while length < min(end, LONGEST_MATCH) and tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        if length >= n:
            found.append((length, end))
    if not found:
        return []
    _, end = max(found[-MOST_OCCURRENCES:])
    text = list(tokens)
    for j in range(count):
        text.append(text[end + j])
    return text[last:]


def test_the_longest_match_is_found_however_the_text_grows() -> None:
    rng, drafted = random.Random(0), 0
    for _ in range(1000):
        n, count = rng.randint(1, 4), rng.randint(1, 7)
        tokens = [rng.randrange(rng.randint(1, 5)) for _ in range(rng.randint(0, 60))]
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


def test_requests_have_texts_of_their_own() -> None:
    lookups = RepeatLookups(2)
    texts = [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [1, 2]]
    assert [lookups.find(i, text, 3) for i, text in enumerate(texts)] == [[3, 1, 2], [4, 1, 2], []]
    lookups.forget(0)
    assert lookups.find(0, [1, 2], 3) == [], "a request that ended is forgotten"
