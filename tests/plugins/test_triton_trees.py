"""spec_attention's Triton kernels with draft trees: like the reference, and nodes with the bits of their paths."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from tests.plugins.test_triton_attention import CHUNK, TOLERANCE, Arguments, both_forms, check, launch
from tests.unit.attention_cases import LONGEST, Batch, Model, Part, TreePart, chain_batch, tree_batch, tree_parts

cases = st.builds(
    Model,
    kv_heads=st.integers(1, 2),
    heads=st.sampled_from([2, 6, 14]),
    head_dim=st.sampled_from([8, 16, 20]),
    dtype=st.sampled_from(list(TOLERANCE)),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([0, 0, 3, 70]),
    softcap=st.sampled_from([0.0, 5.0]),
    sinks=st.booleans(),
)


def arguments_of(batch: Batch) -> Arguments:
    return {name: value for name, value in vars(batch).items() if name != "tensors"}


chains = st.builds(Part, st.integers(0, 2), st.integers(0, 140), st.integers(1, 6))


@settings(deadline=None, max_examples=20)
@given(cases, st.lists(tree_parts(8) | chains, min_size=1, max_size=3), st.booleans())
def test_trees_are_the_reference_s(model: Model, parts: list[Part | TreePart], split: bool) -> None:
    """Trees next to chains; what no row sees is NaN."""
    check(arguments_of(tree_batch(model.random_sequences(3, LONGEST), parts)), split)


@both_forms
@pytest.mark.parametrize("heads", [6, pytest.param(34, marks=pytest.mark.long)])
def test_a_node_has_the_bits_of_its_path_as_a_chain(split: bool, heads: int) -> None:
    """34 heads of one KV head take more than one program a row."""
    sequences = Model(heads=heads, kv_heads=2, head_dim=16, block_size=16).random_sequences(1, LONGEST)
    tree = TreePart(0, CHUNK - 3, (-1, -1, 0, 1, 1, 3, 5, 6))
    out = launch(arguments_of(tree_batch(sequences, [tree])), split)
    for node in range(-1, len(tree.parents)):
        alone = launch(arguments_of(chain_batch(sequences, tree, node)), split)
        assert torch.equal(out[1 + node], alone[0]), node


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tree_mask", {"tree_mask": torch.ones(4, 1, dtype=torch.int32)}),
        ("tree_base", {"tree_base": None}),
        ("tree_base", {"tree_base": torch.zeros(2, dtype=torch.int32)}),
        ("ancestors", {"ancestors": torch.zeros(3, 1, dtype=torch.int32)}),
        ("ancestors", {"ancestors": torch.zeros(4, 1, dtype=torch.int64)}),
    ],
)
def test_bad_trees_are_named(name: str, change: Arguments) -> None:
    batch = tree_batch(Model().random_sequences(1, 40), [TreePart(0, 20, (-1, -1, 0))])
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        launch({**arguments_of(batch), **change})
