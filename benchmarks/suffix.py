"""The host's cost of suffix decoding: time per proposal and per token added to the tree, and memory per token.

    python benchmarks/suffix.py --requests 10000 --tokens 1000 --json suffix.json

Responses are made of runs of 4 to 64 tokens. A share of `--copied` of the runs comes from earlier responses. The others
are random tokens from `--vocab` ids, the frequent ones first as in text (Zipf). The tree is filled with --requests
responses, which is timed. Adding a tenth more, each of which drives an old one out, is timed, too. Then a request of
--tokens tokens, random likewise, grows by two tokens at a time, and each step's proposal is timed.

Times are CPU times of the one thread, and medians unless the name says otherwise. The last figure is that of the pool
for n-gram lookup (is_public_pool). The pool is filled with 200,000 matches of 4 tokens after patterns that are all
different, which takes the most memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trtspec.methods.ngram.pool import NGramPool
from trtspec.methods.suffix.drafter import TOKENS_PER_RESPONSE, SuffixDrafter
from trtspec.methods.suffix.tree import SuffixTree
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Writer:
    """A writer of responses, each of which may quote the last few hundred."""

    def __init__(self, vocab: int, copied: float, seed: int) -> None:
        self.vocab, self.copied = vocab, copied
        self.rng = np.random.default_rng(seed)
        self.earlier: list[list[int]] = []

    def response(self, length: int) -> list[int]:
        text: list[int] = []
        while len(text) < length:
            run = int(self.rng.integers(4, 65))
            if self.earlier and self.rng.random() < self.copied:
                source = self.earlier[self.rng.integers(len(self.earlier))]
                at = int(self.rng.integers(len(source)))
                text += source[at : at + run]
            else:
                text += (np.minimum(self.rng.zipf(1.2, size=run), self.vocab) - 1).tolist()
        self.earlier = [*self.earlier[-499:], text[:length]]
        return text[:length]


def absorb(tree: SuffixTree, responses: Iterator[list[int]]) -> list[float]:
    """Seconds per token of each response."""
    seconds = []
    for response in responses:
        start = time.thread_time()
        for _ in tree.absorb(response):
            pass
        seconds.append((time.thread_time() - start) / len(response))
    return seconds


def propose(drafter: SuffixDrafter, text: list[int], K: int, steps: int) -> tuple[list[float], float]:
    """Seconds per proposal, and the mean number of drafts."""
    seconds, drafts = [], 0
    known = len(text) - 2 * steps
    for end in range(known, len(text), 2):
        request = DraftRequest(0, text[:end], K, GREEDY, (), 0, prompt_len=known // 2)
        start = time.thread_time()
        proposal = drafter.propose([request])
        seconds.append(time.thread_time() - start)
        drafts += int(proposal.draft_lens.sum())
    return seconds, drafts / steps


def bytes_per_match(size: int = 200_000) -> float:
    """Bytes per match of a pool of `size` matches."""
    tracemalloc.start()
    pool = NGramPool(size, keep_all=True)
    text = list(range(1000, 1000 + size + 6))  # ids that Python keeps no copy of, like most of a real vocabulary
    for n in range(size):
        pool.add(tuple(text[n : n + 2]), tuple(text[n + 2 : n + 6]))
    del text
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1000, help="of each response")
    parser.add_argument("--depth", type=int, default=24, help="suffix_decoding_max_tree_depth, and K")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--copied", type=float, default=0.5, help="share of runs that were said before")
    parser.add_argument("--steps", type=int, default=2000, help="proposals")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()

    writer = Writer(args.vocab, args.copied, seed=0)
    tree = SuffixTree(args.depth, args.requests, args.requests * TOKENS_PER_RESPONSE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filling = absorb(tree, (writer.response(args.tokens) for _ in range(args.requests)))
    size = args.requests * args.tokens
    figures = {
        "us_per_token_in": 1e6 * statistics.median(filling),
        "bytes_per_token": tree.nbytes / size,
        "resident_bytes_per_token": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / size,
    }
    turnover = absorb(tree, (writer.response(args.tokens) for _ in range(max(args.requests // 10, 1))))
    figures["us_per_token_in_and_out"] = 1e6 * statistics.median(turnover)
    figures["bytes_per_token_after_turnover"] = tree.nbytes / size
    drafter = SuffixDrafter(args.depth, tree, max_spec_factor=1.0, min_token_prob=0.1)
    text = [token for _ in range(1 - (-2 * args.steps // args.tokens)) for token in writer.response(args.tokens)]
    seconds, drafts = propose(drafter, text[-args.tokens - 2 * args.steps :], args.depth, args.steps)
    figures["us_per_proposal"] = 1e6 * statistics.median(seconds)
    figures["us_per_proposal_p99"] = 1e6 * statistics.quantiles(seconds, n=100)[-1]
    figures["drafts_per_proposal"] = drafts
    figures["bytes_per_pool_match"] = bytes_per_match()
    for name, value in figures.items():
        print(f"{name:>32} {value:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": str(args.json), **figures}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
