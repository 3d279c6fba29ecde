"""C++ spec_attention with draft trees: like the reference, and each node with the bits of its path as a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.plugins.test_cpu_attention import (
    LONGEST,
    POISON,
    RELATIVE,
    TILE,
    assert_near,
    assert_same,
    edges,
    expected,
    models,
)
from tests.unit.attention_cases import Batch, Model, Part, TreePart, chain_of, tree_batch, tree_parts
from trtspec.ops import load_plugins


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    if "cpu" not in load_plugins():
        pytest.skip("the C++ kernels are not built (python -m trtspec_plugins.cpu)")


plain_parts = st.builds(Part, st.integers(0, 2), edges, st.integers(1, 40))


@settings(max_examples=80, deadline=None)
@given(model=models(), parts=st.lists(tree_parts(40) | plain_parts, min_size=1, max_size=3))
def test_trees_like_the_reference(model: Model, parts: list[Part | TreePart]) -> None:
    batch = tree_batch(model.random_sequences(3, LONGEST), parts)
    theirs, k_cache, v_cache = expected(batch)
    assert_near(batch.run(), theirs)
    assert_same(batch.k_cache, k_cache)
    assert_same(batch.v_cache, v_cache)


@settings(max_examples=100, deadline=None)
@given(model=models(), tree=tree_parts(), others=st.lists(plain_parts, max_size=2))
def test_a_node_has_the_bits_of_its_path_as_a_chain(model: Model, tree: TreePart, others: list[Part]) -> None:
    sequences = model.random_sequences(3, LONGEST)
    batch = tree_batch(sequences, [*others[:1], tree, *others[1:2]])
    out = batch.run()[others[0].num_rows if others else 0 :]
    for node in range(-1, len(tree.parents)):
        assert_same(out[1 + node], chain_of(sequences, tree, node))


@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
@pytest.mark.parametrize("start", [0, TILE - 5, TILE - 1, 3 * TILE - 30])
def test_a_large_tree_has_the_bits_of_its_paths(dtype: torch.dtype, start: int) -> None:
    """A tree whose rows are several pieces of work, and whose paths cross tiles."""
    sequences = Model(heads=6, kv_heads=2, head_dim=64, dtype=dtype).random_sequences(1, LONGEST)
    tree = TreePart(0, start, tuple(max(i - 1 - i % 3, -1) for i in range(120)))
    out = tree_batch(sequences, [tree]).run()
    for node in range(-1, len(tree.parents), 7):
        assert_same(out[1 + node], chain_of(sequences, tree, node))


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
def test_a_node_reaches_only_those_after_it(poison: float, dtype: torch.dtype) -> None:
    sequences = Model(head_dim=64, dtype=dtype).random_sequences(1, LONGEST)
    tree = TreePart(0, TILE - 3, (-1, -1, 0, 1, 1, 3))
    clean = tree_batch(sequences, [tree]).run()
    for x in (sequences.k, sequences.v):
        x[0, TILE - 1] = poison  # node 1
    out = tree_batch(sequences, [tree]).run()
    others = [0, 1, 3]
    assert_same(out[others], clean[others])
    assert not out[[2, 4, 5, 6]].isfinite().any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tree_mask", lambda batch: {"tree_mask": torch.ones(4, 1, dtype=torch.int32)}),
        ("tree_base", lambda batch: {"tree_base": batch.tree_base.long()}),
        ("tree_base", lambda batch: {"tree_base": batch.tree_base[:0]}),
        ("ancestors", lambda batch: {"ancestors": batch.ancestors.long()}),
        ("ancestors", lambda batch: {"ancestors": batch.ancestors[1:]}),
        ("ancestors", lambda batch: {"ancestors": batch.ancestors + 1}),
        ("ancestors", lambda batch: {"tree_base": batch.tree_base + 1}),
        ("ancestors", lambda batch: {"tree_base": batch.tree_base - 1000}),
        ("ancestors", lambda batch: {"ancestors": torch.zeros(4, 64, dtype=torch.int32)}),
        ("tree_base", lambda batch: {"tree_base": None}),
    ],
)
def test_bad_trees_are_named(name: str, change: Callable[[Batch], dict[str, Tensor | None]]) -> None:
    batch = tree_batch(Model().random_sequences(1, 40), [TreePart(0, 20, (-1, -1, 0))])
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        replace(batch, **change(batch)).run()
