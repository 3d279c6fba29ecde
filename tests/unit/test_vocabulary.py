"""The map between two vocabularies against a brute force, over tokenizers that spell blanks differently."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from trtspec.errors import ConfigError
from trtspec.text import Tokenizer
from trtspec.text.vocabulary import VocabularyMap, map_vocabularies

BYTES, PIECES = "\u0120", "\u2581"


def tokenizer(words: list[str], marker: str, plain: bool = False, **special: str) -> Tokenizer:
    """A tokenizer with ids in the order of `words`, which writes blanks as `marker`.

    plain: no token of it shows the marker.
    """
    vocabulary = {word: token for token, word in enumerate(words)}
    merges = [] if plain else [(marker, "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = byte_level if marker == BYTES else pre_tokenizers.Metaspace(marker, "never")
    return Tokenizer(backend, special)


def draw_words(rng: random.Random, marker: str) -> list[str]:
    """A random choice of words without a blank, with a blank, or with the other tokenizer's marker, in any order."""
    other = PIECES if marker == BYTES else BYTES
    words = [
        "b",
        "ab",
        "ba",
        "<s>",
        "</s>",
        "\n",
        *(m + w for m in (marker, " ", other) for w in ("", "b", "ab", "ba")),
    ]
    words = [marker, "a", marker + "a", *rng.sample([w for w in words if w != marker], rng.randint(3, 15))]
    rng.shuffle(words)
    return words


def brute_force(ours: list[str], theirs: list[str], sizes: tuple[int, int]) -> dict[int, int]:
    """Map target ids to draft ids. The target marks blanks with BYTES, the draft with PIECES."""
    our_texts = [word.replace(BYTES, " ", 1) if word.startswith(BYTES) else word for word in ours[: sizes[0]]]
    their_texts = [word.replace(PIECES, " ", 1) if word.startswith(PIECES) else word for word in theirs[: sizes[1]]]
    return {
        i: their_texts.index(text)
        for i, text in enumerate(our_texts)
        if text in their_texts and text not in our_texts[:i]
    }


def pairs(found: VocabularyMap) -> dict[int, int]:
    forth = {i: j for i, j in enumerate(found.target_to_draft.tolist()) if j >= 0}
    back = {i: j for j, i in enumerate(found.draft_to_target.tolist()) if i >= 0}
    assert forth == back
    assert found.num_common == len(forth)
    return forth


@pytest.mark.parametrize("seed", range(60))
def test_the_map_is_that_of_a_brute_force(seed: int) -> None:
    """The map equals that of a brute force.

    Words may be there twice, once with a marker and once with a blank. Models may have fewer or more ids than their
    tokenizers.
    """
    rng = random.Random(seed)
    ours, theirs = draw_words(rng, BYTES), draw_words(rng, PIECES)
    sizes = len(ours) + rng.randint(-3, 3), len(theirs) + rng.randint(-3, 3)
    found = map_vocabularies(tokenizer(ours, BYTES), tokenizer(theirs, PIECES), *sizes, draft_ends=(0,))
    assert (len(found.target_to_draft), len(found.draft_to_target)) == sizes
    assert pairs(found) == brute_force(ours, theirs, sizes)


def test_a_marker_counts_only_where_it_begins_a_token_of_its_own_tokenizer() -> None:
    ours = [BYTES, "a", BYTES + "a", BYTES + BYTES + "b", PIECES + "b", "b" + BYTES, "x"]
    theirs = ["x", PIECES + "a", PIECES, "a", " " + BYTES + "b", PIECES + BYTES + "b", PIECES + "b", "b" + BYTES]
    found = map_vocabularies(tokenizer(ours, BYTES), tokenizer(theirs, PIECES), 7, 8, draft_ends=(0,))
    assert pairs(found) == {0: 2, 1: 3, 2: 1, 3: 4, 5: 7, 6: 0}


def test_a_tokenizer_that_does_not_show_its_marker_may_have_either() -> None:
    theirs = [PIECES, "a", PIECES + "a", PIECES + "b", PIECES + "c"]
    plain = tokenizer([BYTES, "a", BYTES + "b", PIECES + "c"], BYTES, plain=True)
    assert pairs(map_vocabularies(plain, tokenizer(theirs, PIECES), 4, 5, draft_ends=(0,))) == {0: 0, 1: 1, 2: 3, 3: 4}


WORDS = ["a", PIECES, PIECES + "a", "<unk>", "</s>"]


@pytest.mark.parametrize(
    ("special", "ends", "size", "unknown"),
    [
        ({"unk_token": "<unk>", "eos_token": "</s>"}, (2,), 5, 3),
        ({"unk_token": "a", "eos_token": "</s>"}, (2,), 5, 0),  # id 0 is an id like others
        ({"eos_token": "</s>"}, (2,), 5, 4),
        ({"unk_token": "not there", "eos_token": "</s>"}, (2,), 5, 4),
        ({"unk_token": "<unk>", "eos_token": "</s>"}, (2,), 3, 2),  # id 3 is past the model's ids
        ({}, (4, 2), 5, 2),
    ],
)
def test_what_stands_for_unknown_tokens(
    special: dict[str, str], ends: tuple[int, ...], size: int, unknown: int
) -> None:
    draft = tokenizer(WORDS, PIECES, **special)
    assert map_vocabularies(tokenizer(WORDS, PIECES), draft, 5, size, ends).unknown == unknown


def test_nothing_stands_for_unknown_tokens() -> None:
    with pytest.raises(ConfigError, match=r"neither an unk_token nor an eos_token.*tokenizer_config\.json"):
        map_vocabularies(tokenizer(WORDS, PIECES), tokenizer(WORDS, PIECES), 5, 5)
