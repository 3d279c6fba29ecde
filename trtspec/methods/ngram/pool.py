"""N-gram lookup in a pool of tokens that followed each n-gram before, in this request or (public) in any.

The pool is that of TensorRT-LLM's NGramDecodingConfig (tensorrt_llm/_torch/speculative/ngram.py). It maps a pattern of
n tokens to its matches, in the order in which they were found. A match is the up to K tokens that followed the pattern.

Each call scans the new tokens of a request. The scan begins K + n - 1 tokens before the end of the text of the last
call, n being the greatest length. So a match that the end of the text had cut is found again at full length. A new
match removes the shorter ones of its pattern. Drafts are the oldest (or newest) match of the last n tokens, for the
greatest n that has one.

Without keep_all a pattern has one match, which only a longer one replaces. That is what upstream's documentation says;
its code adds others nevertheless, which makes no difference where the oldest is used. As a second difference, a pool
here has a limit of `size` matches. Above the limit, the oldest patterns leave the pool with all their matches. A match
of 4 tokens takes some 450 bytes if no pattern occurs twice, and less otherwise. The default of 200,000 matches takes
90 MB (benchmarks/suffix.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from trtspec.core import Proposal
from trtspec.methods.history import proposal_of
from trtspec.methods.ngram.options import NGramOptions
from trtspec.protocols import DraftRequest

Tokens = tuple[int, ...]


class NGramPool:
    """A map from each pattern to its matches, oldest first. A match is 1 to K tokens.

    A new match removes those shorter than itself. So none is longer than one before it: the oldest is the longest.
    """

    def __init__(self, size: int, keep_all: bool) -> None:
        self.size, self.keep_all = size, keep_all
        self._matches: dict[Tokens, dict[Tokens, None]] = {}  # a dict without values is an ordered set
        self._patterns: deque[Tokens] = deque()  # oldest first
        self._used = 0

    def __len__(self) -> int:
        """Number of matches in the pool."""
        return self._used

    def add(self, pattern: Tokens, match: Tokens) -> None:
        """Record that `match` followed `pattern`."""
        known = self._matches.get(pattern)
        if known is None:
            known = self._matches[pattern] = {}
            self._patterns.append(pattern)
        elif match in known or (not self.keep_all and len(match) <= len(next(iter(known)))):
            return
        while known and len(next(reversed(known))) < len(match):
            known.popitem()
            self._used -= 1
        known[match] = None
        self._used += 1
        while self._used > self.size:
            self._used -= len(self._matches.pop(self._patterns.popleft()))

    def find(self, pattern: Tokens, oldest: bool) -> Tokens:
        """Oldest or newest match of `pattern`, () if there is none."""
        known = self._matches.get(pattern)
        return () if known is None else next(iter(known) if oldest else reversed(known))


class NGramPoolDrafter:
    """A drafter that looks up patterns of `smallest` to `largest` tokens in a pool.

    All requests share one pool or, if not `public`, each has its own.
    """

    def __init__(
        self,
        smallest: int,
        largest: int,
        num_drafts: int,
        *,
        oldest: bool = True,
        keep_all: bool = True,
        public: bool = True,
        size: int = 200_000,
    ) -> None:
        self.smallest, self.largest, self.num_drafts = smallest, largest, num_drafts
        self.oldest, self.keep_all, self.public, self.size = oldest, keep_all, public, size
        self._public = NGramPool(size, keep_all)
        self._private: dict[int, NGramPool] = {}  # request id -> pool
        self._scanned: dict[int, int] = {}  # request id -> index at which its next scan begins

    @classmethod
    def of(cls, options: NGramOptions, num_drafts: int) -> NGramPoolDrafter:
        """Return the drafter of these options, for `num_drafts` drafts a step."""
        return cls(
            options.prompt_lookup_min,
            options.prompt_lookup_max,
            num_drafts,
            oldest=not options.prompt_lookup_latest,
            keep_all=options.is_keep_all,
            public=bool(options.is_public_pool),
            size=options.ngram_pool_size,
        )

    def forget(self, request_id: int) -> None:
        """Drop the request's own pool. Matches that the request added to the public one stay."""
        self._private.pop(request_id, None)
        self._scanned.pop(request_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return for each request, in order, the match that was found, at most max_draft_len tokens."""
        return proposal_of(requests, [self._lookup(request) for request in requests])

    def learn(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Add the end of a request's text to the pool that all requests share."""
        if self.public:
            self._scan(request_id, tokens)

    def _scan(self, request_id: int, tokens: Sequence[int]) -> None:
        """Add what is new in a request's text to its pool."""
        new = tuple(tokens[self._scanned.get(request_id, 0) :])
        self._scanned[request_id] = max(0, len(tokens) - (self.num_drafts + self.largest - 1))
        pool = self._pool(request_id)
        for n in self._sizes(tokens):
            for end in range(n, len(new)):
                pool.add(new[end - n : end], new[end : end + self.num_drafts])

    def _pool(self, request_id: int) -> NGramPool:
        if self.public:
            return self._public
        return self._private.setdefault(request_id, NGramPool(self.size, self.keep_all))

    def _sizes(self, tokens: Sequence[int]) -> range:
        return range(min(self.largest, len(tokens) - 1), self.smallest - 1, -1)

    def _lookup(self, request: DraftRequest) -> Tokens:
        pool, tokens = self._pool(request.request_id), request.tokens
        self._scan(request.request_id, tokens)
        sizes = self._sizes(tokens)
        found = (pool.find(tuple(tokens[-n:]), self.oldest) for n in sizes)
        return next((match for match in found if match), ())
