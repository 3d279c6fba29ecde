"""Draft trees: their shape, strict acceptance along them, the drafts of a node's children, and masks of a grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from trtspec.backends.compiled import CompiledStep
from trtspec.config.tree import DraftTree, DynamicTree, Tree, chain, parse_tree
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.draw import draw_children, draw_drafts, process
from trtspec.methods.tree import TreeTables, accept_path
from trtspec.methods.tree_drafts import Level
from trtspec.ops import spec_accept
from trtspec.ops.sample import noise_of
from trtspec.sampling_params import RequestSampling, SamplingParams
from trtspec.text import Tokenizer
from trtspec.verify.grammar import Guide
from trtspec.verify.grammar_drafts import Vocabulary

SEVEN = DraftTree(parse_tree("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)]"))
VOCAB = 5


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(paths))
        paths.append((*parent, sum(path[:-1] == parent and len(path) > len(parent) for path in paths)))
    return DraftTree(tuple(sorted(paths[1:], key=lambda path: (len(path), path))))


# --- shape ------------------------------------------------------------------------------------------------------------


def test_the_shape_of_a_tree() -> None:
    assert SEVEN.parents == (-1, -1, 0, 0, 1, 2, 4)
    assert SEVEN.depths == (1, 1, 2, 2, 2, 3, 3)
    assert SEVEN.depth == 3
    assert SEVEN.inner == (0, 1, 2, 4)
    assert [SEVEN.within(depth) for depth in range(5)] == [0, 2, 5, 7, 7]
    assert SEVEN.path(6) == [1, 4, 6]
    assert SEVEN.path(-1) == []


@given(trees())
def test_parents_come_first_and_paths_end_with_their_node(tree: DraftTree) -> None:
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert tree.path(node) == [*tree.path(parent), node]
        assert tree.paths[node][:-1] == (tree.paths[parent] if parent >= 0 else ())


@pytest.mark.parametrize("tree", [None, SEVEN, DynamicTree(3, 9, 2)])
def test_a_compiled_step_keeps_its_tree(tree: Tree | None) -> None:
    """Folders of older versions say nothing of a tree."""
    step = CompiledStep((), (), (), "float32", vocab_size=VOCAB, weight_bytes=0, kernels="", tree=tree)
    data = json.loads(json.dumps(step.to_dict()))
    assert CompiledStep.from_dict(data) == step
    data.pop("tree")
    assert CompiledStep.from_dict(data) == replace(step, tree=None)


@pytest.mark.parametrize("is_dynamic", [False, True])
@settings(max_examples=60, deadline=None)
@given(tree=trees(), data=st.data())
def test_rows_of_layers_have_the_paths_of_their_nodes(is_dynamic: bool, tree: DraftTree, data: st.DataObject) -> None:
    N = tree.num_nodes
    contexts = data.draw(st.lists(st.integers(1, 20), max_size=2))
    counts = data.draw(st.lists(st.integers(0, N), min_size=not contexts, max_size=3))  # nodes of each generation
    K = max(counts, default=0)
    lengths = [*contexts, *(count + 1 for count in counts)]
    attn = AttnMetadata.of(lengths, [length + 5 for length in lengths], [[1]] * len(lengths))
    rows = sum(count + 1 for count in counts) + len(contexts)
    spec = replace(
        SpecMetadata.plain((), attn, sampling(*[SamplingParams(temperature=0.0)] * rows)),
        draft_tokens=torch.zeros(len(counts), K, dtype=torch.int64),
        draft_lens=torch.tensor([*[0] * len(contexts), *counts], dtype=torch.int32),
        draft_parents=torch.tensor([*tree.parents[:K]] * len(counts), dtype=torch.int64).view(len(counts), K)
        if is_dynamic
        else None,
    )
    tables = TreeTables.of(DynamicTree(tree.depth, N) if is_dynamic else tree)
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    paths = [[-1] * tree.depth for _ in range(sum(contexts))]
    for count in counts:
        paths += [(tree.path(node) + [-1] * tree.depth)[: tree.depth] for node in range(-1, count)]
    assert tables.ancestors(StepInputs(ids, attn, spec)).tolist() == paths


# --- acceptance -------------------------------------------------------------------------------------------------------


def walk(tree: DraftTree, drafts: Sequence[int], count: int, sampled: Sequence[int], forced: int) -> list[int]:
    """Rows of the path that is accepted, by going from node to node."""
    rows = [0]
    while True:
        children = [n for n in range(count) if tree.parents[n] == rows[-1] - 1]
        agreed = [n for n in children if drafts[n] == sampled[rows[-1]]]
        if forced >= 0:
            agreed = children if len(rows) - 1 < forced else []
        if not agreed:
            return rows
        rows.append(agreed[0] + 1)


@settings(max_examples=100, deadline=None)
@given(tree=trees(), data=st.data())
def test_acceptance_walks_from_node_to_node(tree: DraftTree, data: st.DataObject) -> None:
    B, N = data.draw(st.integers(1, 4)), len(tree.paths)
    ids = st.integers(0, 2)  # so few that nodes often agree, and siblings are sometimes equal
    drafts = [data.draw(st.lists(ids, min_size=N, max_size=N)) for _ in range(B)]
    sampled = [data.draw(st.lists(ids, min_size=N + 1, max_size=N + 1)) for _ in range(B)]
    counts = [data.draw(st.integers(0, N)) for _ in range(B)]
    forced = [data.draw(st.sampled_from([-1, -1, 0, 1, 2, 9])) for _ in range(B)]
    emits = [data.draw(st.booleans()) for _ in range(B)]
    verdict = accept_path(
        torch.tensor(sampled),
        torch.tensor(drafts),
        torch.tensor(tree.parents),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(forced, dtype=torch.int32),
        torch.tensor(emits),
        tree.depth,
    )
    assert verdict.path is not None
    for b in range(B):
        rows = walk(tree, drafts[b], counts[b], sampled[b], forced[b]) if emits[b] else []
        padding = [-1] * (N + 1 - len(rows))
        assert verdict.path[b].tolist() == [*rows, *padding]
        assert verdict.tokens[b].tolist() == [*[sampled[b][row] for row in rows], *padding]
        assert verdict.num_tokens[b] == len(rows)


@settings(max_examples=100, deadline=None)
@given(K=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_a_chain_is_accepted_as_spec_accept_does(K: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    B = 5
    sampled, drafts = (torch.randint(0, 2, (B, n), generator=g) for n in (K + 1, K))
    lens = torch.randint(0, K + 1, (B,), generator=g).int()
    forced = torch.randint(-2, K + 2, (B,), generator=g).clamp(min=-1).int()
    emits = torch.rand(B, generator=g) < 0.8
    parents = torch.tensor(DraftTree(chain(K)).parents)
    verdict = accept_path(sampled, drafts, parents, lens, forced, emits, K)
    tokens, num_tokens = spec_accept(sampled, drafts, lens, forced, emits)
    assert torch.equal(verdict.tokens, tokens)
    assert torch.equal(verdict.num_tokens, num_tokens)


# --- children ---------------------------------------------------------------------------------------------------------


def sampling(*params: SamplingParams) -> SamplingTensors:
    asked = [RequestSampling.of(one, seed, 1, (), {}) for seed, one in enumerate(params)]
    return SamplingTensors.of(asked, [7] * len(asked))


def test_children_are_the_largest_of_logits_plus_noise() -> None:
    """The first child is the draft of a chain, and each further one is the draft if those before it are ruled out."""
    rows = sampling(SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.5))
    ids = torch.arange(VOCAB)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    children, scores = draw_children(logits, rows, ids, ids, VOCAB)
    assert scores is not None
    assert children.sort(1).values.equal(ids.expand(3, -1))
    assert children[0].equal(logits[0].argsort(descending=True))
    left = logits.clone()
    for i in range(VOCAB - 1):
        expected = draw_drafts(left, rows, ids, ids)
        assert children[:, i].equal(expected)
        value = process(logits, rows).gather(1, expected[:, None])[:, 0]
        noise = noise_of(rows.seeds, rows.positions, expected[:, None])[:, 0]
        assert scores[:, i].equal(torch.where(rows.greedy, value, value + noise))
        left.scatter_(1, expected[:, None], -1e9)


def test_what_a_filter_removes_is_no_child() -> None:
    rows = sampling(SamplingParams(temperature=1.0, top_k=2))
    ids, logits = torch.arange(VOCAB), torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])
    found, scores = draw_children(logits, rows, ids, ids, 4)
    [children] = found.tolist()
    assert scores is not None
    assert scores[0].isinf().tolist() == [False, False, True, True]
    unscored, nothing = draw_children(logits, rows, ids, ids, 4, scored=False)
    assert unscored.equal(found)
    assert nothing is None
    assert set(children[:2]) == {1, 3}
    assert children[2:] == children[:1] * 2, "the first one is repeated, and is never accepted twice"


def test_children_have_ids_of_the_target() -> None:
    target_ids, draft_ids = torch.tensor([1, 4, 6]), torch.tensor([-1, 0, -1, -1, 1, -1, 2, -1])
    rows = sampling(SamplingParams(temperature=0.0))
    assert draw_children(torch.tensor([[1.0, 3.0, 2.0]]), rows, target_ids, draft_ids, 3)[0].tolist() == [[4, 6, 1]]


# --- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 8))
def test_the_first_nodes_take_the_passes_of_their_depth(count: int) -> None:
    tables, passes = TreeTables.of(SEVEN), list[int]()

    def run(step: int, level: Level) -> torch.Tensor:
        passes.append(step)
        return level.tokens[:, None]

    def children(step: int, hidden: torch.Tensor, _: SamplingTensors, most: int) -> tuple[torch.Tensor, None]:
        return 10 * hidden + 1 + torch.arange(most), None  # the digits of an id are the ranks on its path

    attn = AttnMetadata.of([1], [9], [[1]])
    drafts, *_ = tables.draft(torch.zeros(1, 1).long(), attn, sampling(SamplingParams()), run, children, count)
    assert drafts.tolist() == [[1, 2, 11, 12, 21, 111, 213][:count]]
    assert passes == list(range(1, SEVEN.depths[count - 1]))


# --- grammar ----------------------------------------------------------------------------------------------------------


def test_masks_follow_the_branches_of_a_tree() -> None:
    """The mask of a node is that of a chain to it. Nodes that the grammar forbids, and those after them, have none."""
    xgrammar = pytest.importorskip("xgrammar", reason="pip install 'trtspec[guided]'")
    vocabulary = ["</s>", "a", "b", "c", "d"]
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({one: i for i, one in enumerate(vocabulary)})))
    words = Vocabulary(tokenizer, [b"", *(one.encode() for one in vocabulary[1:])])
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=5, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("(ab|ba(c|d)?)(a|c)*")
    rng = random.Random(0)
    seen = set()
    for _ in range(60):
        parents = [rng.randint(-1, i - 1) for i in range(8)]
        drafts = [rng.randrange(5) for _ in parents]
        guide = Guide(xgrammar.GrammarMatcher(compiled), 1, words, [0])
        masks = torch.full((9, 1), -1, dtype=torch.int32)
        guide.fill(masks, drafts, parents)
        again = torch.full((9, 1), -1, dtype=torch.int32)
        guide.fill(again, drafts, parents)
        assert masks.equal(again), "the state is unchanged"
        for node in range(8):
            path: list[int] = []
            up = node
            while up >= 0:
                path.insert(0, up)
                up = parents[up]
            alone: Any = torch.full((len(path) + 1, 1), -1, dtype=torch.int32)
            Guide(xgrammar.GrammarMatcher(compiled), 1, words, [0]).fill(alone, [drafts[one] for one in path])
            assert masks[node + 1].equal(alone[-1])
            seen.add(int(masks[node + 1]))
    assert len(seen) > 3
