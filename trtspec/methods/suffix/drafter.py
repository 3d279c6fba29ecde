"""Suffix decoding: drafts what most often followed the longest matches of the last tokens, weighed by its frequency.

The method is that of Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications" (2024).
Settings, scoring and the depth limit are those of Arctic Inference, which vLLM calls for method="suffix".

The last tokens are looked up in two sources: the request's own text (prompt and output) and the responses of requests
that ended before (tree.py). In each source, a guess is made for match lengths m = 1, 2, ... as long as the last m
tokens occur there. A guess has up to min(K, int(m * max_spec_factor + 1e-6)) drafts. Each draft is the token that most
often follows, the lowest id of equals. Its probability is the share of the match's occurrences after which all drafts
up to it follow. A guess ends before the first draft with a probability below min_token_prob. A match and its drafts are
at most max_tree_depth tokens. A match at the very end of a text is an occurrence that nothing follows. Of the
others in the request's own text only the latest MOST_OCCURRENCES count, as repetitive text would take too long. (In
Arctic Inference all count.)

A tree has the tokens that follow the best match of each source; `grow` has their order.

The guess with the greatest sum of probabilities is chosen. Of equal guesses from one source it is the one with the
longer match; of equal guesses from both sources it is the one from the request's own text.

A response enters the tree when its request ends (in Arctic Inference: while it is generated). The pace is limited, so
that long responses do not delay all requests. Each call of `propose` adds ABSORBED_PER_CALL tokens and a few for each
request, or removes as many to make room. Where calls are rare, it adds up to twice as many tokens as its requests got
since their last call. At most max_cached_requests responses are kept, with TOKENS_PER_RESPONSE times as many tokens; no
more than that may wait. If max_cached_requests is 0, there is no tree.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import Proposal
from trtspec.errors import CapacityError
from trtspec.methods.drafter import DraftModel
from trtspec.methods.history import TokenHistory, TokenTree, proposal_of, proposal_of_trees
from trtspec.methods.suffix.options import SuffixOptions
from trtspec.methods.suffix.tree import END, Guess, SuffixTree
from trtspec.ops.sample import scalar_noise
from trtspec.protocols import DraftRequest

TOKENS_PER_RESPONSE = 1024
"""Average tokens per response: max_cached_requests times as many tokens are kept. A longer one displaces others."""
MOST_OCCURRENCES = 256
"""Number of a match's occurrences that count in a request's own text: the latest ones, without that at its end."""
ABSORBED_PER_CALL = 256
ABSORBED_PER_REQUEST = 8
MOST_ABSORBED_PER_REQUEST = 128


class SuffixDrafter:
    """A drafter for suffix decoding, as the module describes it.

    tree: shared by all requests; None: the last tokens are looked up in the request's own text only.
    """

    def __init__(self, depth: int, tree: SuffixTree | None, max_spec_factor: float, min_token_prob: float) -> None:
        self.depth, self.tree = depth, tree
        self.max_spec_factor, self.min_token_prob = max_spec_factor, min_token_prob
        self._history = TokenHistory(margin=depth)
        self._responses: dict[int, array[int]] = {}  # request id -> its response, as far as received
        self._ended: deque[array[int]] = deque()
        self._absorbing = self._arrivals()

    @classmethod
    def of(
        cls, speculation: SpeculationPlan, model: DraftModel | None = None, max_num_tokens: int = 0
    ) -> SuffixDrafter:
        """Return the drafter of these options. CapacityError if there is no memory for the tree."""
        options = cast("SuffixOptions", speculation.options)
        cached = options.suffix_decoding_max_cached_requests
        depth = min(options.suffix_decoding_max_tree_depth, speculation.max_model_len)  # no text is longer
        try:
            tree = SuffixTree(depth, cached, cached * TOKENS_PER_RESPONSE) if cached else None
        except MemoryError as error:
            raise CapacityError(
                f"suffix_decoding_max_cached_requests={cached}: there is no memory for so many responses of "
                f"{TOKENS_PER_RESPONSE} tokens; lower it"
            ) from error
        return cls(depth, tree, options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Absorb some of the responses that wait; return the best guess for each request, in order."""
        known = [request.prompt_len + len(self._responses.get(request.request_id, ())) for request in requests]
        news = [len(request.tokens) - length for request, length in zip(requests, known, strict=True)]
        most = ABSORBED_PER_CALL + sum(
            [min(max(2 * new, ABSORBED_PER_REQUEST), MOST_ABSORBED_PER_REQUEST) for new in news]
        )
        if sum(1 for _ in islice(self._absorbing, most)) < most:  # nothing waits any more: this iterator is at its end
            self._absorbing = self._arrivals()
        if requests[0].max_depth is not None:
            return proposal_of_trees(requests, [self._tree(request) for request in requests])
        return proposal_of(requests, [self._guess(request).tokens for request in requests])

    def learn(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Take in the response of a request, so far."""
        if self.tree is not None:
            response = self._responses.setdefault(request_id, array("i"))
            response.extend(tokens[prompt_len + len(response) :])

    def forget(self, request_id: int) -> None:
        """Queue the request's response for the tree, and drop all else that is kept for the request."""
        self._history.forget(request_id)
        response = self._responses.pop(request_id, None)
        if self.tree is not None and response:
            self._ended.append(response[-self.tree.max_tokens :])
            while len(self._ended) > self.tree.max_responses or sum(map(len, self._ended)) > self.tree.max_tokens:
                self._ended.popleft()

    def _arrivals(self) -> Iterator[None]:
        """Absorb the responses that wait; each step of the iterator adds or removes one token."""
        while self.tree is not None and self._ended:
            yield from self.tree.absorb(self._ended.popleft())

    def _guess(self, request: DraftRequest) -> Guess:
        lengths = match_lengths(self.depth, request.max_draft_len, self.max_spec_factor)
        best = Guess()
        for source in self._sources(request):
            best, _ = choose(source, lengths, best)
        return best

    def _tree(self, request: DraftRequest) -> TokenTree:
        """Merge what follows the best match in each source, that of the better guess first."""
        tree, lengths = (
            TokenTree(request.max_draft_len),
            match_lengths(self.depth, request.max_depth or 0, self.max_spec_factor),
        )
        # of equal guesses that of the request's own text, the last source, comes first
        found = [(*choose(source, lengths, Guess()), source) for source in list(self._sources(request))[::-1]]
        found.sort(key=lambda one: -Fraction(one[0].count, one[0].total))
        for guess, match_len, source in found:
            if guess.tokens:
                budget = next(most for most, length in lengths if length == match_len)
                grow(tree, source.matches(match_len), budget, self.min_token_prob, request)
        return tree

    def _sources(self, request: DraftRequest) -> Iterator[MatchSource]:
        """The past responses, if they are kept, then the request's own text."""
        text = self._history.update(request)
        if self.tree is not None:
            self.learn(request.request_id, request.tokens, request.prompt_len)
            pattern = array("i", request.tokens[-self.depth :])
            yield PastResponses(self.tree, pattern, self.min_token_prob)
        yield OwnText(text, self.depth, self.min_token_prob)


class MatchSource(Protocol):
    """A source of matches: the request's own text, or the tree of past responses."""

    def guess(self, match_len: int, budget: int) -> Guess | None:
        """Return what follows the last `match_len` tokens, at most `budget` tokens; None if these do not occur."""
        ...

    def longest(self, below: int) -> int:
        """Greatest length of a match; the caller knows that matches are shorter than `below`."""
        ...

    def matches(self, match_len: int) -> Matches:
        """Return the occurrences of the last `match_len` tokens, of which there are some."""
        ...


class Matches(Protocol):
    """Occurrences of a string, in a source of matches."""

    @property
    def count(self) -> int:
        """Number of occurrences, those that nothing follows included."""
        ...

    def follow(self, least: int) -> Iterable[tuple[int, Matches]]:
        """Return the tokens that follow `least` times, each with the occurrences of the string that is longer by it."""
        ...


@lru_cache(maxsize=64)
def match_lengths(depth: int, num_drafts: int, factor: float) -> list[tuple[int, int]]:
    """Return pairs (maximum drafts, match length). Those that can score highest are first; of equals the longest."""
    pairs = [(min(num_drafts, int(m * factor + 1e-6), depth - m), m) for m in range(1, depth)]
    return sorted((pair for pair in pairs if pair[0] > 0), reverse=True)


def choose(place: MatchSource, lengths: Sequence[tuple[int, int]], best: Guess) -> tuple[Guess, int]:
    """Return the best guess of a source and the length of its match, or `best` and 0 if all have lower scores.

    Scores are compared as fractions, so that equal scores compare as equal.
    """
    longest, best_len = None, 0
    for budget, match_len in lengths:
        if budget * best.total < best.count:
            break  # no probability exceeds 1, so nothing can be better any more
        if longest is not None and match_len > longest:
            continue
        guess = place.guess(match_len, budget)
        if guess is None:
            longest = place.longest(match_len)
            continue
        ours, theirs = guess.count * best.total, best.count * guess.total
        if ours > theirs or (ours == theirs and match_len > best_len):
            best, best_len = guess, match_len
    return best, best_len


class PastResponses:
    """A MatchSource that looks up the last tokens of one request in the tree."""

    def __init__(self, tree: SuffixTree, pattern: array[int], min_prob: float) -> None:
        self.tree, self.pattern, self.min_prob = tree, pattern, min_prob
        self._found: dict[int, int | None] = {}  # match length -> child that `SuffixTree.locate` returned

    def _locate(self, match_len: int) -> int | None:
        if match_len not in self._found:
            occurs = match_len <= len(self.pattern)
            self._found[match_len] = self.tree.locate(self.pattern[-match_len:]) if occurs else None
        return self._found[match_len]

    def longest(self, below: int) -> int:
        """Greatest length of a match, by bisection: where a match occurs, shorter ones do, too."""
        return bisect_left(range(1, below), True, key=lambda match_len: self._locate(match_len) is None)

    def guess(self, match_len: int, budget: int) -> Guess | None:
        """Return what follows the last `match_len` tokens in the tree, at most `budget` tokens; None if no match."""
        found = self._locate(match_len)
        return None if found is None else self.tree.draft(found, match_len, budget, self.min_prob)

    def matches(self, match_len: int) -> Matches:
        """Return the occurrences of the last `match_len` tokens in the tree."""
        found = self._locate(match_len)
        assert found is not None
        return _InTree(self.tree, found, match_len)


class _InTree:
    """The Matches of a string in a suffix tree. child, depth: as in SuffixTree.follow."""

    def __init__(self, tree: SuffixTree, child: int, depth: int) -> None:
        self.tree, self.child, self.depth, self.count = tree, child, depth, tree.count(child)

    def follow(self, least: int) -> Iterator[tuple[int, Matches]]:
        for token, child in self.tree.follow(self.child, self.depth, least):
            yield token, _InTree(self.tree, child, self.depth + 1)


class OwnText:
    """A MatchSource that searches the tokens of one request.

    The tokens are not kept in a tree. The search takes a pass over them with each call, but a long prompt costs no time
    to build a tree. Longer matches are searched from the latest place back, until no earlier one can count.
    """

    def __init__(self, text: NDArray[np.int64], depth: int, min_prob: float) -> None:
        """Find all matches. text: tokens [L] with `depth` elements of -1 on both sides."""
        self.text, self.min_prob = text, min_prob
        last = len(text) - depth - 1
        # Positions where the last token occurs [N], and where the last two do [M]: most of the N need no closer look.
        self.ends = depth + np.flatnonzero(text[depth:last] == text[last])
        near = self.ends[text[self.ends - 1] == text[last - 1]]
        back, lengths, full = np.arange(depth), list[NDArray[np.int64]](), 0
        for stop in range(len(near), 0, -4 * MOST_OCCURRENCES):
            same = text[near[max(stop - 4 * MOST_OCCURRENCES, 0) : stop, None] - back] == text[last - back]
            same[:, -1] = False  # a match of `depth` tokens leaves no room for drafts
            # No match runs past the beginning: there it meets -1, and the last tokens, which begin later, have a token.
            lengths.insert(0, same.argmin(axis=1))
            full += int(np.count_nonzero(lengths[0] == depth - 1))
            if full >= MOST_OCCURRENCES:
                break
        self.lengths = np.concatenate([*lengths, np.zeros(0, np.int64)])  # [M], length of the match that ends there
        self.near = near[len(near) - len(self.lengths) :]
        self._guesses: dict[tuple[bytes, int], Guess] = {}  # (occurrences, budget) -> what follows them

    def longest(self, below: int) -> int:
        """Greatest length of a match. The end of the text itself does not count, because nothing follows it."""
        return int(self.lengths.max(initial=min(len(self.ends), 1)))

    def guess(self, match_len: int, budget: int) -> Guess | None:
        """Return what follows the last `match_len` tokens in the text, at most `budget` tokens; None if no match."""
        ends = self._ends(match_len)
        if not len(ends):
            return None
        key = ends.tobytes(), budget  # in repetitive text, matches of many lengths end at the same places
        if key not in self._guesses:
            self._guesses[key] = self._following(ends, budget)
        return self._guesses[key]

    def _following(self, ends: NDArray[np.int64], budget: int) -> Guess:
        total, drafts, score = len(ends) + 1, list[int](), 0  # total: includes the end of the text
        rows = self.text[ends[:, None] + np.arange(1, budget + 1)].tolist()  # tokens after each of them
        while len(drafts) < budget:
            column = [row[len(drafts)] for row in rows]
            token, count = column[0], column.count(column[0])
            if count < len(column) or token == END:
                counts = Counter(column)
                del counts[END]
                token = max(counts, key=lambda token: (counts[token], -token), default=END)
                count = counts[token]
            if token == END or count / total < self.min_prob:
                break
            drafts.append(token)
            score += count
            if count < len(rows):
                rows = [row for row in rows if row[len(drafts) - 1] == token]
        return Guess(drafts, score, total)

    def matches(self, match_len: int) -> Matches:
        """Return the occurrences of the last `match_len` tokens in the text."""
        return _InText(self.text, self._ends(match_len), 1)

    def _ends(self, match_len: int) -> NDArray[np.int64]:
        """Last indices of the occurrences that count."""
        ends = self.ends if match_len == 1 else self.near[self.lengths >= match_len]
        return ends[-MOST_OCCURRENCES:]


class _InText:
    """The Matches of a string in a text. ends: their last indices. past: 1 if one more is at the end of the text."""

    def __init__(self, text: NDArray[np.int64], ends: NDArray[np.int64], past: int = 0) -> None:
        self.text, self.ends, self.count = text, ends, len(ends) + past

    def follow(self, least: int) -> Iterator[tuple[int, Matches]]:
        after = self.text[self.ends + 1]
        tokens, counts = np.unique(after, return_counts=True)
        for token in tokens[counts >= least].tolist():
            if token != END:
                yield token, _InText(self.text, self.ends[after == token] + 1)


def grow(tree: TokenTree, matches: Matches, depth: int, min_prob: float, request: DraftRequest) -> None:
    """Add the tokens that follow the matches, the best first, while there is room: at most `depth` tokens ahead.

    The tokens up to a token follow a share of the matches, at least `min_prob`. The score of the token is the logarithm
    of that share, plus the noise of the target's draw at its position. It is at most that of the token before it. Of
    equal scores, a token that is less far ahead comes first, then one after an earlier draft, then the lower id.
    """
    first, total = len(request.tokens), matches.count
    waiting: list[tuple[float, int, int, int, Matches]] = []

    def add(score: float, ahead: int, parent: int, found: Matches) -> None:
        for token, longer in found.follow(int(min_prob * total)) if ahead <= depth else ():
            if longer.count / total >= min_prob:
                own = math.log(longer.count / total)
                if not request.sampling.greedy:
                    own += scalar_noise(request.sampling.seed, first + ahead - 1, token)
                heapq.heappush(waiting, (-min(own, score), ahead, parent, token, longer))

    add(math.inf, 1, -1, matches)
    while waiting and not tree.is_full:
        score, ahead, parent, token, found = heapq.heappop(waiting)
        node = tree.child(parent, token)
        assert node is not None
        add(-score, ahead + 1, node, found)
