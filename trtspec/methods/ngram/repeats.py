"""Lookups next to a model that drafts, as the setting sa_config asks for.

Where the last `threshold` tokens of a request or more occurred earlier in its prompt and output, what followed there
is drafted. The occurrence with the longest match counts; of equally long ones, the latest. If drafts reach the end of
the text, they go on with themselves, so that a loop is drafted at any length.

TensorRT-LLM's lookups of this name use a suffix automaton. Here a text is indexed by its runs of `threshold` tokens,
because a lookup is made for each request in each step. The n-gram drafter searches the text instead.
"""

from __future__ import annotations

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

    def __len__(self) -> int:
        """Number of requests whose text is kept."""
        return len(self._texts)


class IndexedText:
    """A growing text, and where each run of n tokens in it ends."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # run -> number of tokens before its end, where it occurs last
        self._before: list[int] = []  # by that number: where the same run ends before, 0 = nowhere

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The run at the end of the text is indexed once the text goes on."""
        self.tokens += tokens
        for end in range(len(self._before), len(self.tokens)):
            run = tuple(self.tokens[end - self.n : end]) if end >= self.n else ()
            self._before.append(self._latest.get(run, 0) if run else 0)
            if run:
                self._latest[run] = end

    def after_repeat(self, count: int) -> list[int]:
        """Return `count` tokens that followed the longest match of the text's end; none if its last n are new."""
        tokens, last, n = self.tokens, len(self.tokens), self.n
        best, longest = 0, 0
        end = self._latest.get(tuple(tokens[last - n :]), 0) if last > n else 0
        for _ in range(MOST_OCCURRENCES):
            if end == 0 or longest == LONGEST_MATCH:
                break
            length, most = n, min(end, LONGEST_MATCH)
            while length < most and tokens[end - length - 1] == tokens[last - length - 1]:
                length += 1
            if length > longest:
                best, longest = end, length
            end = self._before[end]
        if best == 0:
            return []
        found = tokens[best : best + count]
        for _ in range(count - len(found)):
            found.append(found[len(found) - (last - best)])
        return found
