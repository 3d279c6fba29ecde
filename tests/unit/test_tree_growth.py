"""Draft trees that each step shapes: their tables, how a model's trees grow, and how guesses on the host are merged."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.drafting import GREEDY, question
from tests.unit.test_draft_trees import trees
from tests.unit.test_suffix import MIN_PROB, OCCURRENCES, TEXT, Counted, CountedLatest, consume
from trtspec.config.tree import DraftTree, DynamicTree, node_depths
from trtspec.core import AttnMetadata, Proposal, SamplingTensors, SpecMetadata
from trtspec.methods.history import TokenTree
from trtspec.methods.ngram.drafter import MATCHES_PER_DRAFT, NGramDrafter
from trtspec.methods.suffix import drafter as suffix
from trtspec.methods.suffix.drafter import OwnText, PastResponses, grow
from trtspec.methods.suffix.tree import SuffixTree
from trtspec.methods.tree import DynamicTables, TreeTables
from trtspec.methods.tree_drafts import Level
from trtspec.ops.sample import noise_of, scalar_noise
from trtspec.sampling_params import RequestSampling, SamplingParams

# --- shapes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_tables_of_given_parents_are_those_of_the_shape(shapes: list[DraftTree]) -> None:
    """Several requests have trees of their own; what is past a request's nodes is a child of the last token."""
    K, depth = max(one.num_nodes for one in shapes), max(one.depth for one in shapes)
    parents = torch.tensor([[*one.parents, *[-1] * (K - one.num_nodes)] for one in shapes])
    attn = AttnMetadata.of([K + 1] * len(shapes), [K + 5] * len(shapes), [[1]] * len(shapes))
    spec = SpecMetadata.plain(range(len(shapes)), attn, SamplingTensors.of([GREEDY] * len(shapes), [1] * len(shapes)))
    spec = dataclasses.replace(spec, draft_tokens=torch.zeros_like(parents), draft_parents=parents)
    found = DynamicTables(DynamicTree(depth, K)).shape(spec)
    for b, one in enumerate(shapes):
        N = one.num_nodes
        expected = TreeTables.of(one).shape(dataclasses.replace(spec, draft_tokens=torch.zeros(1, N)))
        assert found.depths[b, : N + 1].equal(expected.depths[0])
        assert found.paths[b, : N + 1, : one.depth].equal(expected.paths[0])
        assert (found.paths[b, : N + 1, one.depth :] == -1).all()
        assert node_depths(one.parents) == list(one.depths)


def test_limits_of_a_tree() -> None:
    tree = DynamicTree(depth=3, num_nodes=12, top_k=3)
    assert [tree.within(depth) for depth in range(5)] == [0, 3, 11, 12, 12]
    assert [tree.depth_of(count) for count in (0, 1, 3, 4, 12)] == [0, 1, 1, 2, 3]
    assert [DynamicTree(3, 12).depth_of(count) for count in (0, 1, 12)] == [0, 3, 3]  # of a drafter on the host
    assert tree.draft_rows == 6
    on_host = DynamicTree(depth=3, num_nodes=12)
    assert [on_host.within(depth) for depth in range(4)] == [0, 12, 12, 12]
    assert on_host.draft_rows == 0


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_each_depth_of_a_models_tree_has_its_number_of_nodes(depth: int, top_k: int, data: st.DataObject) -> None:
    """So a schedule's depth is known from the number of nodes."""
    num_nodes = data.draw(st.integers(depth, top_k + (depth - 1) * top_k**2))
    tree = DynamicTree(depth, num_nodes, top_k)
    assert [tree.depth_of(tree.within(d)) for d in range(depth + 1)] == list(range(depth + 1))
    assert tree.within(depth) == num_nodes


# --- trees that a model grows -----------------------------------------------------------------------------------------

VOCAB = 7
Logits = Callable[[int, tuple[int, ...]], Tensor]
"""(request, tokens of a path) -> the draft's logits [VOCAB] for the token after it."""


class Grown:
    """A model whose logits depend on the path alone, and the trees that grow from it.

    It reads the path of a row through the row's ancestors, as attention does: from the tokens that passes wrote.
    """

    def __init__(self, B: int, depth: int, top_k: int, count: int, logits: Logits, reads: bool = True) -> None:
        self.B, self.depth, self.top_k, self.logits = B, depth, top_k, logits
        self.rows: list[dict[int, int]] = [{} for _ in range(B)]  # KV row after the kept ones -> token
        self.kept = torch.tensor([9 + b for b in range(B)], dtype=torch.int32)
        asked = [RequestSampling.of(SamplingParams(temperature=t), b, 1, (), {}) for b, t in enumerate([0.0, 1.0, 0.5])]
        self.sampling = SamplingTensors.of(asked[:B], [20 + b for b in range(B)])
        attn = AttnMetadata.of([1] * B, self.kept.tolist(), [[1]] * B)
        root = torch.arange(B, dtype=torch.float32)[:, None] * 100
        tables = TreeTables.of(DynamicTree(depth, count, top_k))
        self.drafts, parents, counts = tables.draft(
            root, attn, self.sampling, self.run if reads else None, self.children, count
        )
        assert parents is not None
        assert counts is not None
        self.parents, self.counts = parents, counts
        self.paths: list[tuple[int, ...]] = []

    def run(self, step: int, level: Level) -> Tensor:
        """Write the tokens to KV rows, and return the number of a path for each row as its output."""
        n = self.top_k
        assert level.attn.kv_lens.tolist() == [int(kept) + step * n for kept in self.kept]
        assert level.attn.tree_base is not None
        assert level.attn.tree_base.equal(self.kept)
        assert level.attn.positions(self.B * n).tolist() == [
            int(self.kept[r // n]) + step - 1 for r in range(self.B * n)
        ]
        outputs = []
        for r, token in enumerate(level.tokens.tolist()):
            self.rows[r // n][(step - 1) * n + r % n] = token
        assert level.attn.ancestors is not None
        for r, line in enumerate(level.attn.ancestors.tolist()):
            own = [row for row in line if row >= 0]
            assert len(own) == step
            assert own[-1] == (step - 1) * n + r % n
            outputs.append(self.number(r // n, tuple(self.rows[r // n][row] for row in own)))
        return torch.tensor(outputs, dtype=torch.float32)[:, None]

    def number(self, request: int, path: tuple[int, ...]) -> float:
        self.paths = [*getattr(self, "paths", []), path]
        return request * 100 + len(self.paths)

    def children(self, step: int, hidden: Tensor, sampling: SamplingTensors, count: int) -> tuple[Tensor, Tensor]:
        rows = []
        for r, value in enumerate(hidden[:, 0].tolist()):
            request, place = divmod(int(value), 100)
            path = self.paths[place - 1] if place else ()
            logits = self.logits(request, path)
            if not bool(sampling.greedy[r]):
                ids = torch.arange(VOCAB)[None]
                logits = logits + noise_of(sampling.seeds[r : r + 1], sampling.positions[r : r + 1], ids)[0]
            rows.append(logits)
        scores, ids = torch.stack(rows).sort(dim=1, descending=True, stable=True)
        return ids[:, :count], scores[:, :count]


def expected_tree(
    b: int, grown: Grown, depth: int, top_k: int, count: int, reads: bool
) -> tuple[list[int], list[int], int]:
    """Nodes of request b by their definition: tokens, parents, number."""
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    nodes: list[tuple[float, int, int, int, tuple[int, ...]]] = []
    for d in range(1, depth + 1):
        level = []
        for place, (path, score) in enumerate(beam):
            logits = grown.logits(b, path if reads else ())
            position = grown.sampling.positions[b : b + 1] + d - 1
            if not bool(grown.sampling.greedy[b]):
                logits = logits + noise_of(grown.sampling.seeds[b : b + 1], position, torch.arange(VOCAB)[None])[0]
            values, ids = logits.sort(descending=True, stable=True)
            values, ids = values[:top_k], ids[:top_k]
            own = values - values.logsumexp(0)
            for rank, (token, gain) in enumerate(zip(ids.tolist(), own.tolist(), strict=True)):
                if values[rank] > float("-inf"):
                    level.append((score + gain, (place, rank), (*path, token)))
        level.sort(key=lambda one: (-one[0], one[1]))
        nodes += [(-score, d, *place, path) for score, place, path in level]
        beam = [(path, score) for score, _, path in level[:top_k]]
    nodes.sort(key=lambda one: (round(one[0], 4), *one[1:4]))
    kept = [path for *_, path in nodes[:count]]
    numbers = {path: i for i, path in enumerate(kept)}
    return [path[-1] for path in kept], [numbers.get(path[:-1], -1) for path in kept], len(kept)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_trees_grow_where_guesses_are_likely(seed: int, reads: bool) -> None:
    rng = random.Random(seed)
    depth, top_k = rng.randint(1, 4), rng.randint(1, 4)
    count = rng.randint(depth, top_k + (depth - 1) * top_k**2) if top_k > 1 else depth

    def logits(request: int, path: tuple[int, ...]) -> Tensor:
        made = torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((seed, request, path)) % 2**31)) * 3
        if seed % 3 == 0:
            made[2:] = float("-inf")  # as filters do
        return made

    if seed % 3 == 0 and top_k > 2:
        count = min(count, 2 * depth)
    grown = Grown(3, depth, top_k, count, logits, reads)
    for b in range(3):
        tokens, parents, number = expected_tree(b, grown, depth, top_k, count, reads)
        assert grown.counts[b] == number
        assert grown.drafts[b, :number].tolist() == tokens
        assert grown.parents[b, :number].tolist() == parents
        assert grown.drafts[b, number:].tolist() == [-1] * (count - number)


@pytest.mark.parametrize("odd", [math.inf, math.nan, -math.inf])
def test_guesses_without_a_finite_score_are_left_out(odd: float) -> None:
    """So is what would follow them. Other requests keep their trees."""

    def logits(request: int, path: tuple[int, ...]) -> Tensor:
        made = torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((request, path)) % 2**31))
        if request == 1:
            made[: VOCAB - len(path)] = odd
        return made

    grown = Grown(3, 3, 3, 12, logits)
    for b in range(3):
        number = int(grown.counts[b])
        assert all(-1 <= parent < node for node, parent in enumerate(grown.parents[b, :number].tolist()))
        assert (grown.drafts[b, :number] >= 0).all()
        assert b == 1 or number == 12


# --- guesses on the host ----------------------------------------------------------------------------------------------


def test_guesses_are_merged() -> None:
    tree = TokenTree(5)
    for guess in ([1, 2, 3], [1, 2, 4], [5], [6, 7]):
        tree.add(guess)
    assert tree.tokens == [1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 1, -1]
    assert tree.is_full


def nodes(proposal: Proposal, b: int = 0) -> list[tuple[int, int]]:
    assert proposal.draft_parents is not None
    pairs = zip(proposal.draft_tokens[b].tolist(), proposal.draft_parents[b].tolist(), strict=True)
    return list(pairs)[: int(proposal.draft_lens[b])]


@given(TEXT, st.integers(1, 5), st.integers(1, 12), st.integers(1, 3), st.booleans())
def test_ngram_merges_what_follows_each_occurrence(
    tokens: list[int], depth: int, most: int, largest: int, latest: bool
) -> None:
    most = max(most, depth)
    drafter = NGramDrafter(1, largest, latest)
    asked = dataclasses.replace(question(tokens, most), max_depth=depth)
    expected = TokenTree(most)
    for n in range(min(largest, len(tokens) - 1), 0, -1):
        ends = [i for i in range(n - 1, len(tokens) - 1) if tokens[i - n + 1 : i + 1] == tokens[-n:]]
        for end in (ends[::-1] if latest else ends)[: MATCHES_PER_DRAFT * most]:
            expected.add(tokens[end + 1 : end + 1 + depth])
    found = nodes(drafter.propose([asked]))
    assert found == list(zip(expected.tokens, expected.parents, strict=True))
    chain = NGramDrafter(1, largest, latest).propose([question(tokens, depth)])
    drafts = chain.draft_tokens[0, : chain.draft_lens[0]].tolist()
    assert found[: len(drafts)] == [(token, i - 1) for i, token in enumerate(drafts)], "the chain comes first"


def best_first(
    counted: Counted,
    match: Sequence[int],
    depth: int,
    most: int,
    min_prob: float,
    sampling: RequestSampling,
    first: int,
) -> list[tuple[int, int]]:
    """The nodes after a match, by their definition: every one that may be drafted, the best `most` of them."""
    seen = counted.after(match)
    total, every = seen[tuple(match)], list[tuple[float, int, tuple[int, ...]]]()

    def visit(path: tuple[int, ...], score: float) -> None:
        if len(path) == depth or len(match) + len(path) == counted.depth:
            return
        for token in counted.vocab:
            count = seen[(*match, *path, token)]
            if count and count / total >= min_prob:
                own = math.log(count / total)
                if not sampling.greedy:
                    own += scalar_noise(sampling.seed, first + len(path), token)
                every.append((-min(own, score), len(path) + 1, (*path, token)))
                visit((*path, token), min(own, score))

    visit((), math.inf)
    chosen: list[tuple[int, ...]] = []
    while every and len(chosen) < most:
        numbers = {path: i for i, path in enumerate(chosen)}
        ready = [one for one in every if len(one[2]) == 1 or one[2][:-1] in numbers]
        best = min(ready, key=lambda one: (one[0], one[1], numbers.get(one[2][:-1], -1), one[2][-1]))
        every.remove(best)
        chosen.append(best[2])
    numbers = {path: i for i, path in enumerate(chosen)}
    return [(path[-1], numbers.get(path[:-1], -1)) for path in chosen]


@settings(deadline=None)
@given(
    st.lists(TEXT, min_size=1, max_size=5), TEXT, st.integers(1, 4), st.integers(1, 9), MIN_PROB, st.booleans(),
    st.integers(0, 2**63 - 1), OCCURRENCES,
)  # fmt: skip
def test_suffix_trees_have_the_likeliest_tokens(
    responses: list[list[int]],
    tokens: list[int],
    depth: int,
    most: int,
    min_prob: float,
    greedy: bool,
    seed: int,
    occurrences: int,
) -> None:
    """Those that most often follow, with the target's noise where the request is sampled, in both sources."""
    sampling = dataclasses.replace(GREEDY, greedy=greedy, seed=seed)
    asked = dataclasses.replace(question(tokens, most, sampling=sampling), max_depth=depth)
    longest = 12
    shared = SuffixTree(longest, 99, 9999)
    for response in responses:
        consume(shared.absorb(response))
    text = torch.tensor([*[-1] * longest, *tokens, *[-1] * longest]).numpy()
    with mock.patch.object(suffix, "MOST_OCCURRENCES", occurrences):
        sources = (
            (PastResponses(shared, array("i", tokens[-longest:]), min_prob), Counted(responses, longest)),
            # its strings may be of any length
            (OwnText(text, longest, min_prob), CountedLatest(tokens, len(tokens) + depth, occurrences)),
        )
        for source, counted in sources:
            for match_len in range(1, min(len(tokens), longest - 1) + 1):
                if source.guess(match_len, 1) is None:
                    break
                tree = TokenTree(most)
                grow(tree, source.matches(match_len), depth, min_prob, asked)
                match = tokens[-match_len:]
                found = list(zip(tree.tokens, tree.parents, strict=True))
                assert found == best_first(counted, match, depth, most, min_prob, sampling, len(tokens))


def test_noise_on_the_host_is_that_of_the_op() -> None:
    rng = random.Random(0)
    for _ in range(300):
        seed, position, token = rng.randrange(-(2**63), 2**63), rng.randrange(2**34), rng.randrange(2**18)
        there = noise_of(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token]])).item()
        assert scalar_noise(seed, position, token) == pytest.approx(there, rel=1e-4, abs=1e-4)
