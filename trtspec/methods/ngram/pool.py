"""N-gram lookup in a pool of what followed each n-gram before, in this request or (public) in any.

The pool is that of TensorRT-LLM's NGramDecodingConfig (tensorrt_llm/_torch/speculative/ngram.py): it maps a pattern of
n tokens to matches, the up to K tokens that followed it, in the order in which they were found. With each call the new
tokens of a request are scanned, from K + n - 1 tokens before the end of what was known last, so that a match which the
end of the text had cut is found again at full length; a new match drives out the shorter ones of its pattern. Drafts
are the oldest (or newest) match of the last n tokens, for the greatest n that has one.

Without keep_all a pattern has one match, which only a longer one replaces. That is what upstream's documentation says;
its code adds others all the same, which nobody sees where the oldest is used. Nor does a pool grow for ever here: it
holds at most `size` matches, and what is too much leaves it with its pattern, the first that came first. A match of 4
tokens takes some 450 bytes where no pattern comes twice, less elsewhere: 90 MB for the 200,000 of the default
(benchmarks/suffix.py).
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
    """Pattern -> matches, in order of age. A match is 1 to K tokens.

    As a new match drives out those shorter than itself, none is longer than one before it: the oldest is the longest.
    """

    def __init__(self, size: int, keep_all: bool) -> None:
        self.size, self.keep_all = size, keep_all
        self._matches: dict[Tokens, dict[Tokens, None]] = {}  # a dict without values is an ordered set
        self._patterns: deque[Tokens] = deque()  # in order of age
        self._used = 0

    def __len__(self) -> int:
        """Matches in the pool."""
        return self._used

    def add(self, pattern: Tokens, match: Tokens) -> None:
        """Note that `match` followed `pattern`."""
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
        """Its oldest or newest match, () if there is none."""
        known = self._matches.get(pattern)
        return () if known is None else next(iter(known) if oldest else reversed(known))


class NGramPoolDrafter:
    """Patterns of `smallest` to `largest` tokens in one pool for all requests, or (not `public`) in one for each."""

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
        self._scanned: dict[int, int] = {}  # request id -> where its next scan begins

    @classmethod
    def of(cls, options: NGramOptions, num_drafts: int) -> NGramPoolDrafter:
        """As the settings say, for `num_drafts` drafts a step."""
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
        """Drop the request's own pool. What it gave to the public one stays."""
        self._private.pop(request_id, None)
        self._scanned.pop(request_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See protocols.Drafter."""
        return proposal_of(requests, [self._lookup(request) for request in requests])

    def _lookup(self, request: DraftRequest) -> Tokens:
        pool, tokens = self._public, request.tokens
        if not self.public:
            pool = self._private.setdefault(request.request_id, NGramPool(self.size, self.keep_all))
        new = tuple(tokens[self._scanned.get(request.request_id, 0) :])
        self._scanned[request.request_id] = max(0, len(tokens) - (self.num_drafts + self.largest - 1))
        sizes = range(min(self.largest, len(tokens) - 1), self.smallest - 1, -1)
        for n in sizes:
            for end in range(n, len(new)):
                pool.add(new[end - n : end], new[end : end + self.num_drafts])
        found = (pool.find(tuple(tokens[-n:]), self.oldest) for n in sizes)
        return next((match for match in found if match), ())
