"""The suffix tree of past responses: how often a string of up to `depth` tokens occurs, and what follows it most often.

Every token of a response begins a *window*: the token and what follows it, at most `depth` tokens, or fewer and the END
of the response. The tree is the compressed trie of all windows. So the count of a string (windows that begin with it)
is the number of its occurrences.

Nodes are records in flat arrays. A record is made where windows part, or where equal windows end. A new child that only
one window runs through gets no record: it is stored as that window's position in the text. Most children in ordinary
text are of this kind. A record whose count falls to 1 stays.

Responses lie in a ring buffer of tokens and leave it in the order in which they came. Therefore the tokens of an edge
are read from the latest window that runs through it: as long as any of these windows is left, the latest is.

Memory: with T = `max_tokens` there are at most T windows and 2 T records. All arrays together take at most 200 T bytes,
whatever the text is, apart from pieces of rows that wait for other rows of their size. benchmarks/suffix.py measured 33
bytes a token, 330 MB in all, on 10,000 responses of 1,000 tokens. 4 T bytes of this are allocated at the start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

END = -1
"""The token after the last one of a response. It is counted, but never drafted."""
_ROOT = 0
_STALE = -2
"""In place of a node's most frequent child: the child became rarer, and the next lookup has to search again."""


@dataclass(frozen=True)
class Guess:
    """Drafts and the score by which they are chosen.

    The score is the sum of their probabilities, as the exact fraction count / total.
    """

    tokens: list[int] = field(default_factory=list)
    count: int = 0  # sum over k of the occurrences of the matched string that the first k drafts follow
    total: int = 1  # occurrences of the matched string


class SuffixTree:
    """A suffix tree that counts the strings of the last responses.

    A new response removes whole older ones, oldest first, until there are at most `max_responses` responses with at
    most `max_tokens` tokens in all (each with its END). Of a response that is longer, only the end is kept.
    """

    def __init__(self, depth: int, max_responses: int, max_tokens: int) -> None:
        self.depth, self.max_responses, self.max_tokens = depth, max_responses, max_tokens
        # The ring, then its first tokens once more, so that every window is contiguous.
        self._text = array("i", [END]) * (max_tokens + depth)
        self._next = 0  # index at which the next response begins
        self._used = 0
        self._responses: deque[tuple[int, int]] = deque()  # (begin, number of tokens with END), oldest first
        # One record per node. The string of a node is _text[latest : latest + length].
        self._count = array("i")  # number of windows that run through it
        self._latest = array("i")  # index at which the latest of these windows begins
        self._length = array("i")
        self._best = array("i")  # first token of its most frequent child but END; END if there is none; or _STALE
        self._top = array("i")  # count of that child, unless _STALE
        self._bound = array("i")  # upper bound of the other children's counts, unless _STALE
        self._free = array("i")  # records to reuse
        self._rows = Rows()  # children by their first token: a record, or ~(begin of the only window)
        self._record(0, 0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        records = (self._count, self._latest, self._length, self._best, self._top, self._bound, self._free)
        return sum(len(a) * a.itemsize for a in (self._text, *records)) + self._rows.nbytes

    # -- adding and removing responses --------------------------------------------------------------------------------

    def absorb(self, response: Sequence[int]) -> Iterator[None]:
        """Add a response, one window per step of the iterator; before that, remove the oldest in the same way."""
        response = response[-(self.max_tokens - 1) :]
        size = len(response) + 1
        while len(self._responses) >= self.max_responses or self._used + size > self.max_tokens:
            begin, old_size = self._responses[0]
            for i in range(old_size - 1):
                self._remove((begin + i) % self.max_tokens)
                yield
            self._responses.popleft()
            self._used -= old_size
        begin = self._next
        for i, token in enumerate((*response, END)):
            place = (begin + i) % self.max_tokens
            self._text[place] = token
            if place < self.depth:
                self._text[self.max_tokens + place] = token
        self._responses.append((begin, size))
        self._used += size
        self._next = (begin + size) % self.max_tokens
        for i in range(size - 1):
            self._insert((begin + i) % self.max_tokens)
            yield

    def _window(self, begin: int) -> array[int]:
        window = self._text[begin : begin + self.depth]
        return window[: window.index(END) + 1] if END in window else window

    def _insert(self, begin: int) -> None:
        window = self._window(begin)
        node, depth = _ROOT, 0
        while depth < len(window):
            token = window[depth]
            slot = self._rows.find(node, token)
            if slot < 0:
                self._rows.add(node, token, ~begin)
                self._raise(node, token, 1)
                return
            child = self._rows.children[slot]
            if child < 0:
                other, length, count = ~child, len(window), 1
            else:
                other, length, count = self._latest[child], self._length[child], self._count[child]
            if self._text[other + depth : other + length] != window[depth:length]:
                self._rows.children[slot] = self._split(child, count, other, window, begin, depth)
                self._raise(node, token, count + 1)
                return
            if child < 0:  # the same window for the second time
                self._rows.children[slot] = self._record(2, begin, length)
            else:
                self._count[child] += 1
                self._latest[child] = begin
            self._raise(node, token, count + 1)
            node, depth = child, length

    def _split(self, child: int, count: int, other: int, window: array[int], begin: int, depth: int) -> int:
        """Split the edge to `child` where the window at `begin` differs from it, and return the record between.

        other: beginning of a window that runs along this edge.
        """
        while window[depth] == self._text[other + depth]:
            depth += 1
        node = self._record(count + 1, begin, depth)
        for token, below, times in ((self._text[other + depth], child, count), (window[depth], ~begin, 1)):
            self._rows.add(node, token, below)
            self._raise(node, token, times)
        return node

    def _remove(self, begin: int) -> None:
        """Undo `_insert` of the oldest window."""
        window = self._window(begin)
        node, depth, above = _ROOT, 0, -1  # above: the slot that leads to node
        while depth < len(window):
            token = window[depth]
            slot = self._rows.find(node, token)
            child = self._rows.children[slot]
            count = 0 if child < 0 else self._count[child] - 1
            self._lower(node, token, count)
            if count == 0:
                if child >= 0:
                    self._release(child)
                self._rows.remove(node, slot)
                if node != _ROOT and self._rows.size[node] == 1:  # windows no longer part here
                    self._rows.children[above] = self._rows.children[self._rows.start[node]]
                    self._release(node)
                return
            self._count[child] = count
            node, depth, above = child, self._length[child], slot

    def _record(self, count: int, latest: int, length: int) -> int:
        values = (count, latest, length, END, 0, 0)
        arrays = (self._count, self._latest, self._length, self._best, self._top, self._bound)
        if self._free:
            node = self._free.pop()
            for of_all, value in zip(arrays, values, strict=True):
                of_all[node] = value
            return node
        for of_all, value in zip(arrays, values, strict=True):
            of_all.append(value)
        return self._rows.new_node()

    def _release(self, node: int) -> None:
        self._rows.clear(node)
        self._free.append(node)

    # -- the most frequent child --------------------------------------------------------------------------------------

    def _raise(self, node: int, token: int, count: int) -> None:
        """Update a node whose child that begins with `token` now occurs `count` times, once more than before."""
        best = self._best[node]
        if best == _STALE or token == END:
            return
        top = self._top[node]
        if token == best:
            self._top[node] = count
        elif count > top or (count == top and token < best):
            self._best[node], self._top[node], self._bound[node] = token, count, top
        elif count > self._bound[node]:
            self._bound[node] = count

    def _lower(self, node: int, token: int, count: int) -> None:
        """Update a node whose child that begins with `token` now occurs `count` times, once less than before."""
        if token == self._best[node]:
            if count > self._bound[node]:
                self._top[node] = count
            else:
                self._best[node] = _STALE

    def _most_frequent(self, node: int) -> int:
        """First token of the most frequent child that is not END, the lowest of equals; END if there is none."""
        if self._best[node] == _STALE:
            best, top, bound = END, 0, 0
            for token, child in self._rows.items(node):
                count = 1 if child < 0 else self._count[child]
                if token != END and count > top:
                    best, top, bound = token, count, top
                elif token != END and count > bound:
                    bound = count
            self._best[node], self._top[node], self._bound[node] = best, top, bound
        return self._best[node]

    # -- lookup -------------------------------------------------------------------------------------------------------

    def locate(self, pattern: array[int]) -> int | None:
        """Return the child with the shortest string that begins with `pattern`; None if the pattern does not occur.

        pattern: at most `depth` tokens.
        """
        node, depth = _ROOT, 0
        while True:
            slot = self._rows.find(node, pattern[depth])
            if slot < 0:
                return None
            child = self._rows.children[slot]
            if child < 0:
                begin, length = ~child, len(pattern)
            else:
                begin, length = self._latest[child], min(self._length[child], len(pattern))
            if self._text[begin + depth : begin + length] != pattern[depth:length]:
                return None
            if length == len(pattern):
                return child
            node, depth = child, length

    def draft(self, child: int, depth: int, most: int, min_prob: float) -> Guess:
        """Return up to `most` drafts after the match of `depth` tokens that `locate` found at `child`.

        Each draft is the token that most often follows, the END of a response left out. The drafts end where all of
        them together would follow in less than `min_prob` of the match's occurrences.
        """
        last = min(depth + most, self.depth)
        total = count = 1 if child < 0 else self._count[child]
        drafts: array[int] = array("i")
        score = 0
        while depth < last:
            begin, length = (~child, last) if child < 0 else (self._latest[child], min(self._length[child], last))
            edge = self._text[begin + depth : begin + length]
            if END in edge:
                edge = edge[: edge.index(END)]
                last = depth  # nothing follows it
            drafts += edge
            score += count * len(edge)
            depth = length
            if depth >= last or child < 0:
                break
            token = self._most_frequent(child)
            if token == END:
                break
            child = self._rows.children[self._rows.find(child, token)]
            count = 1 if child < 0 else self._count[child]
            if count / total < min_prob:
                break
        return Guess(drafts.tolist(), score, total)

    def follow(self, child: int, depth: int, least: int) -> list[tuple[int, int]]:
        """Tokens that follow a string of `depth` tokens `least` times, each with the child for the longer string.

        child: the child with the shortest string that begins with the string, as `locate` returns it. END is left out.
        """
        if depth >= self.depth:
            return []
        if child < 0 or depth < self._length[child]:  # inside an edge
            token = self._text[(~child if child < 0 else self._latest[child]) + depth]
            return [] if token == END else [(token, child)]
        return [
            (token, below) for token, below in self._rows.items(child) if token != END and self.count(below) >= least
        ]

    def count(self, child: int) -> int:
        """Number of occurrences of a string that ends at `child`."""
        return 1 if child < 0 else self._count[child]


class Rows:
    """A table with a row of (first token, child) pairs for every node, sorted by token.

    All rows lie in two flat arrays. Each row has a piece of 2, 4, 8, ... elements, of which at least a quarter is used.
    Released pieces wait for rows of their size.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.children = array("i")
        self.start = array("i")  # start of each node's row
        self.size = array("i")
        self._room = array("i")
        self._free: dict[int, array[int]] = {}  # size of pieces -> their starts

    @property
    def nbytes(self) -> int:
        arrays = (self.tokens, self.children, self.start, self.size, self._room, *self._free.values())
        return sum(len(a) * a.itemsize for a in arrays)

    def new_node(self) -> int:
        for of_all in (self.start, self.size, self._room):
            of_all.append(0)
        return len(self.size) - 1

    def find(self, node: int, token: int) -> int:
        """Slot of the child that begins with `token`, -1 if there is none."""
        start = self.start[node]
        end = start + self.size[node]
        slot = bisect_left(self.tokens, token, start, end)
        return slot if slot < end and self.tokens[slot] == token else -1

    def items(self, node: int) -> Iterator[tuple[int, int]]:
        start = self.start[node]
        end = start + self.size[node]
        return zip(self.tokens[start:end], self.children[start:end], strict=True)

    def add(self, node: int, token: int, child: int) -> None:
        size = self.size[node]
        if size == self._room[node]:
            self._move(node, max(2 * size, 2))
        start = self.start[node]
        end = start + size
        slot = bisect_left(self.tokens, token, start, end)
        for row, value in ((self.tokens, token), (self.children, child)):
            row[slot + 1 : end + 1] = row[slot:end]
            row[slot] = value
        self.size[node] = size + 1

    def remove(self, node: int, slot: int) -> None:
        size = self.size[node] - 1
        end = self.start[node] + size
        for row in (self.tokens, self.children):
            row[slot:end] = row[slot + 1 : end + 1]
        self.size[node] = size
        if 2 < self._room[node] > 4 * size:
            self._move(node, self._room[node] // 2)

    def clear(self, node: int) -> None:
        if self._room[node]:
            self._free[self._room[node]].append(self.start[node])
        self.size[node] = self._room[node] = 0

    def _move(self, node: int, room: int) -> None:
        waiting = self._free.setdefault(room, array("i"))
        if waiting:
            start = waiting.pop()
        else:
            start = len(self.tokens)
            for row in (self.tokens, self.children):
                row.extend([0] * room)
        old, size = self.start[node], self.size[node]
        for row in (self.tokens, self.children):
            row[start : start + size] = row[old : old + size]
        self.clear(node)
        self.start[node], self.size[node], self._room[node] = start, size, room
