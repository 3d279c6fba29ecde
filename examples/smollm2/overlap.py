"""Runs of 13 words that two texts share: a check that a model was not trained on the data of its measurements."""

from __future__ import annotations

import re
from collections.abc import Iterable

SIZE = 13
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


class Grams:
    """All runs of SIZE words of some texts; for a shorter text, all its words."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams = {gram for text in texts for gram in self._of(text)}

    def overlaps(self, text: str) -> bool:
        """Whether `text` has one of the runs."""
        return any(gram in self._grams for gram in self._of(text))

    @staticmethod
    def _of(text: str) -> Iterable[tuple[str, ...]]:
        own = words(text)
        return (tuple(own[i : i + SIZE]) for i in range(max(1, len(own) - SIZE + 1)))
