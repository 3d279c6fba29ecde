"""Lookups next to a model that drafts: sa_config, after TensorRT-LLM's suffix automaton of the same setting.

Where the last tokens of a request, `threshold` of them or more, occurred earlier in its prompt and output, what
followed there is drafted. Of all occurrences that with the longest match counts, the latest of equals. If drafts reach
the end of the text, they go on with themselves, so that a loop is drafted at any length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

MOST_OCCURRENCES = 32
"""Number of occurrences that are compared: the latest ones. Only they count."""
LONGEST_MATCH = 64
"""Tokens. Longer matches count as equal."""


class RepeatLookups:
    """Drafts of each request where its last `threshold` tokens occurred before. protocols.Lookups has the contract."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._texts: dict[int, IndexedText] = {}

    def find(self, request_id: int, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` drafts or none. Only tokens that are new since the last call are copied."""
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = IndexedText(self.threshold)
        text.extend(tokens[len(text.tokens) :])
        return text.after_repeat(count)

    def forget(self, request_id: int) -> None:
        """Drop the copy of the request's tokens."""
        self._texts.pop(request_id, None)


class IndexedText:
    """A growing text, and where each run of n tokens ends in it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # ascending

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The run at the end of the text is indexed once the text goes on."""
        first = len(self.tokens)
        self.tokens += tokens
        for end in range(max(first, self.n), len(self.tokens)):
            self._ends[tuple(self.tokens[end - self.n : end])].append(end)

    def after_repeat(self, count: int) -> list[int]:
        """Return `count` tokens that followed the longest match of the text's end; none if n tokens do not occur."""
        tokens, last = self.tokens, len(self.tokens)
        best, longest = None, 0
        for end in reversed(self._ends.get(tuple(tokens[last - self.n :]), ())[-MOST_OCCURRENCES:]):
            length = self.n
            while length < min(end, LONGEST_MATCH) and tokens[end - length - 1] == tokens[last - length - 1]:
                length += 1
            if length > longest:
                best, longest = end, length
        if best is None:
            return []
        found = tokens[best : best + count]
        for _ in range(count - len(found)):
            found.append(found[len(found) - (last - best)])
        return found
