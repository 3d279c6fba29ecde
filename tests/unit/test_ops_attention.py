"""spec_attention equals dense attention and reads only what a row may see. A row has the same bits in any batch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.attention_cases import (
    EPSILON,
    LONGEST,
    Model,
    Part,
    TreePart,
    assert_near,
    batches,
    chain_of,
    dense,
    dtypes,
    edges,
    models,
    pack_bits,
    parts_of_up_to_40_rows,
    tree_batch,
    tree_parts,
)
from trtspec.ops.attention import KV_TILE

# --- what is computed -------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(model=models(), parts=batches)
def test_ragged_causal_batches(model: Model, parts: list[Part]) -> None:
    assume(any(part.num_rows for part in parts))
    sequences = model.random_sequences(3, LONGEST)
    for part, out in zip(parts, sequences.attend(parts), strict=True):
        assert_near(out, dense(sequences, part))


@settings(max_examples=40, deadline=None)
@given(model=models(), parts=batches, seed=st.integers(0, 2**31), density=st.sampled_from([0.05, 0.5, 0.95]))
def test_trees_see_committed_rows_and_their_own_bits(
    model: Model, parts: list[Part], seed: int, density: float
) -> None:
    assume(any(part.num_rows for part in parts))
    g = torch.Generator().manual_seed(seed)
    sequences = model.random_sequences(3, LONGEST)
    flags = [(torch.rand(p.num_rows, p.num_rows, generator=g) < density).fill_diagonal_(True) for p in parts]
    words = max(-(-part.num_rows // 32) for part in parts)
    tree_mask = torch.cat([pack_bits(f.tolist(), words).view(-1, words) for f in flags])
    for part, bits, out in zip(parts, flags, sequences.attend(parts, tree_mask), strict=True):
        assert_near(out, dense(sequences, part, bits.tolist()))


def test_a_chain_as_a_tree_is_causal_bit_for_bit() -> None:
    sequences = Model(window=11).random_sequences(2, 300)
    parts = [Part(0, 250, 40), Part(1, 0, 5)]
    flags = [torch.ones(part.num_rows, part.num_rows).tril().bool() for part in parts]
    tree_mask = torch.cat([pack_bits(f.tolist(), 2) for f in flags])
    for tree, causal in zip(sequences.attend(parts, tree_mask), sequences.attend(parts), strict=True):
        assert torch.equal(tree, causal)


@settings(max_examples=40, deadline=None)
@given(model=models(), tree=tree_parts(), others=st.lists(parts_of_up_to_40_rows | tree_parts(), max_size=2))
def test_a_node_has_the_bits_of_its_path_as_a_chain(
    model: Model, tree: TreePart, others: list[Part | TreePart]
) -> None:
    sequences = model.random_sequences(3, LONGEST)
    parts = [*others[:1], tree, *others[1:]]
    sizes = [part.part.num_rows if isinstance(part, TreePart) else part.num_rows for part in parts]
    outs = tree_batch(sequences, parts).run().split(sizes)
    for part, out in zip(parts, outs, strict=True):
        if isinstance(part, TreePart):
            for node in range(-1, len(part.parents)):
                assert torch.equal(out[1 + node], chain_of(sequences, part, node))
        else:
            assert torch.equal(out, sequences.attend([part])[0])


def test_nodes_that_are_no_ancestors_reach_no_node() -> None:
    sequences = Model(block_size=4).random_sequences(1, 30)
    tree = TreePart(0, 20, (-1, -1, 0, 1))
    clean = tree_batch(sequences, [tree]).run()
    for x in (sequences.k, sequences.v):
        x[0, 22] = float("nan")  # node 1
    out = tree_batch(sequences, [tree]).run()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])
    assert out[[2, 4]].isnan().any(-1).any(-1).all()


def test_rows_of_a_tree_are_appended_at_their_own_places() -> None:
    sequences = Model(block_size=4).random_sequences(1, 30)
    tree = TreePart(0, 20, (-1, -1, 0, 1))
    batch, causal = tree_batch(sequences, [tree]), sequences.batch([tree.part])
    batch.run()
    causal.run()
    torch.testing.assert_close(batch.k_cache, causal.k_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.v_cache, causal.v_cache, rtol=0, atol=0, equal_nan=True)


def test_a_draft_pass_reads_nodes_of_earlier_passes() -> None:
    """A pass over the second level alone finds the first level in the cache, as do both levels in one pass."""
    sequences = Model(window=15).random_sequences(1, 40)
    tree = TreePart(0, 20, (-1, -1, 0, 1, 1))
    whole = tree_batch(sequences, [tree])
    expected = whole.run()
    later = sequences.batch([Part(0, 23, 3)])  # rows before 23 are in the cache
    later = replace(later, tree_base=whole.tree_base, ancestors=whole.ancestors[3:])
    assert torch.equal(later.run(), expected[3:])


def test_a_mask_and_a_tree_exclude_each_other() -> None:
    tree = TreePart(0, 20, (-1, -1))
    batch = tree_batch(Model().random_sequences(1, 30), [tree])
    with pytest.raises((ValueError, RuntimeError), match="tree_mask"):
        replace(batch, tree_mask=torch.ones(3, 1, dtype=torch.int32)).run()


def test_seven_node_tree_of_the_literature() -> None:
    """Choices (0,), (1,), (0,0), (0,1), (1,0), (1,1) under a root have the 7 x 7 ancestor mask of the literature."""
    paths = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    bits = [[other == path[: len(other)] for other in paths] for path in paths]
    assert [sum(row) for row in bits] == [1, 2, 2, 3, 3, 3, 3]
    sequences = Model().random_sequences(1, 30)
    part = Part(0, 20, 7)
    assert_near(sequences.attend([part], pack_bits(bits, 1))[0], dense(sequences, part, bits))


def test_scale_is_an_argument() -> None:
    sequences = Model().random_sequences(1, 20)
    part = Part(0, 10, 5)
    doubled = replace(sequences, q=sequences.q * 2)
    batch = sequences.batch([part])
    assert_near(replace(batch, scale=2 * batch.scale).run(), dense(doubled, part))


# --- the cache --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(parts=batches, block_size=st.sampled_from([1, 3, 16]), dtype=dtypes)
def test_rows_are_appended_at_their_slots_and_nowhere_else(
    parts: list[Part], block_size: int, dtype: torch.dtype
) -> None:
    sequences = Model(dtype=dtype, block_size=block_size, head_dim=8).random_sequences(3, LONGEST)
    batch = sequences.batch(parts, poison=7.0)
    before = batch.k_cache.clone(), batch.v_cache.clone()
    batch.run()
    for cache, old, tokens in zip((batch.k_cache, batch.v_cache), before, (sequences.k, sequences.v), strict=True):
        expected = old.clone()
        for part, table in zip(parts, batch.block_tables.tolist(), strict=True):
            for position in range(part.start, part.end):
                slot = table[position // block_size], position % block_size
                expected[slot] = tokens[part.sequence, position]
        assert torch.equal(cache, expected)


def test_rows_past_the_table_go_to_scratch() -> None:
    """A request with one block too few writes its last rows to block 0 only. The rows before them do not change."""
    sequences = Model(block_size=4).random_sequences(2, 40)
    parts = [Part(0, 5, 6), Part(1, 2, 3)]
    whole = sequences.batch(parts)
    expected = whole.run()
    short = sequences.batch(parts)
    short = replace(short, block_tables=short.block_tables[:, :2])  # positions 8, 9, 10 of request 0 have no block
    out = short.run()
    assert torch.equal(out[:3], expected[:3])
    assert torch.equal(out[6:], expected[6:])
    lost = whole.block_tables[0, 2]
    others = [block for block in range(1, len(whole.k_cache)) if block != lost]
    assert torch.equal(short.k_cache[others].isnan(), whole.k_cache[others].isnan())
    assert short.k_cache[lost].isnan().all()
    assert not short.k_cache[0, :3].isnan().any()


def test_scratch_entries_of_a_table_are_never_read() -> None:
    """Table columns after a request's end are 0, and the content of block 0 does not matter."""
    sequences = Model().random_sequences(2, 300)
    parts = [Part(0, 280, 1), Part(1, 3, 1)]  # the second has 1 block of 18 columns
    clean = sequences.batch(parts, poison=0.0).run()
    dirty = sequences.batch(parts)
    dirty.k_cache[0], dirty.v_cache[0] = float("inf"), float("nan")
    assert torch.equal(dirty.run(), clean)


@pytest.mark.parametrize("tree", [False, True])
def test_functional_form_is_the_mutating_one_without_side_effects(tree: bool) -> None:
    sequences = Model(sinks=True, softcap=5.0, window=30).random_sequences(2, 300)
    parts = [Part(0, 250, 9), Part(1, 0, 3)]
    mask = torch.cat([pack_bits(torch.eye(p.num_rows).bool().tolist(), 1) for p in parts]) if tree else None
    functional, mutating = (sequences.batch(parts, mask, poison=0.0) for _ in range(2))
    before = [tensor.clone() for tensor in functional.tensors]
    out, k_cache, v_cache = functional.run_functional()
    assert all(torch.equal(a, b) for a, b in zip(functional.tensors, before, strict=True))
    assert torch.equal(out, mutating.run())
    assert torch.equal(k_cache, mutating.k_cache)
    assert torch.equal(v_cache, mutating.v_cache)


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sequence", [0, 2], ids=["before", "after"])
def test_another_request_full_of_poison_reaches_nobody(poison: float, sequence: int) -> None:
    sequences = Model().random_sequences(3, 300)
    parts = [Part(0, 270, 3), Part(1, 20, 5), Part(2, 100, 30)]
    clean = sequences.attend(parts)
    for tensor in (sequences.q, sequences.k, sequences.v):
        tensor[sequence] = poison
    for part, out, expected in zip(parts, sequences.attend(parts), clean, strict=True):
        assert torch.equal(out, expected) == (part.sequence != sequence)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("head_dim", [16, 6])
def test_a_later_row_does_not_reach_an_earlier_one(poison: float, which: str, head_dim: int) -> None:
    """A later row does not change an earlier one.

    A draft that overflows, as in fp16, is rejected with no effect on rows before it.
    """
    sequences = Model(head_dim=head_dim).random_sequences(2, 300)
    parts = [Part(0, 250, 8), Part(1, 0, 2)]
    clean = sequences.attend(parts)
    getattr(sequences, which)[0, 254, 1, 3] = poison  # row 4, KV head 1
    out, other = sequences.attend(parts)
    assert torch.equal(out[:4], clean[0][:4])
    assert torch.equal(other, clean[1])
    assert torch.equal(out[:, :2], clean[0][:, :2])  # query heads of KV head 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_sees_poison_shows_it(poison: float) -> None:
    sequences = Model().random_sequences(1, 300)
    sequences.v[0, 100, 1, 3] = poison
    out = sequences.attend([Part(0, 280, 5)])[0]
    assert not torch.isfinite(out[:, 2:]).all(-1).any()
    assert torch.isfinite(out[:, :2]).all()


def test_a_row_outside_the_window_is_forgotten() -> None:
    sequences = Model(window=10).random_sequences(1, 300)
    clean = sequences.attend([Part(0, 290, 4)])[0]
    sequences.v[0, 280] = float("nan")  # the last row that sees it is 289
    sequences.k[0, 280] = float("nan")
    assert torch.equal(sequences.attend([Part(0, 290, 4)])[0], clean)


def test_a_tree_row_is_not_reached_by_another_branch() -> None:
    sequences = Model().random_sequences(1, 40)
    part, mask = Part(0, 30, 6), pack_bits(torch.eye(6).bool().tolist(), 1)
    clean = sequences.attend([part], mask)[0]
    sequences.v[0, 32] = float("nan")
    out = sequences.attend([part], mask)[0]
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], clean[others])
    assert out[2].isnan().all()


# --- a row's bits -----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    model=models(),
    cuts=st.lists(edges | st.integers(1, LONGEST - 1), max_size=5),
    neighbours=st.lists(parts_of_up_to_40_rows, max_size=3),
    turn=st.integers(0, 3),
)
def test_a_row_has_the_same_bits_in_every_chunking_and_company(
    model: Model, cuts: list[int], neighbours: list[Part], turn: int
) -> None:
    """One pass over a whole sequence has the bits of the same rows in chunks among other requests."""
    sequences = model.random_sequences(3, LONGEST)
    whole = sequences.attend([Part(0, 0, LONGEST)])[0]
    edges = sorted({0, *cuts, LONGEST})
    for start, end in pairwise(edges):
        place = turn % (len(neighbours) + 1)
        parts = [*neighbours[:place], Part(0, start, end - start), *neighbours[place:]]
        assert torch.equal(sequences.attend(parts)[place], whole[start:end])


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("num_rows", range(1, 18))
def test_a_row_has_the_same_bits_alone_and_with_its_drafts(dtype: torch.dtype, num_rows: int) -> None:
    """A row has the same bits alone and with its drafts: K from 0 to 16, at every place relative to the tile's edge."""
    sequences = Model(heads=6, kv_heads=2, head_dim=64, dtype=dtype).random_sequences(1, KV_TILE + 20)
    for start in (0, 3, KV_TILE - num_rows, KV_TILE - 1, KV_TILE, KV_TILE + 1):
        together = sequences.attend([Part(0, start, num_rows)])[0]
        for i in range(0, num_rows, max(1, num_rows // 3)):
            assert torch.equal(together[i : i + 1], sequences.attend([Part(0, start + i, 1)])[0])


def test_identical_requests_get_identical_bits() -> None:
    """67 copies of one request have identical bits, with rows at every place of the batch."""
    sequences = Model(heads=7, kv_heads=1, head_dim=24).random_sequences(1, 40)
    outputs = sequences.attend([Part(0, 33, 3)] * 67)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


# --- state from call to call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cu_q_lens", "kv_lens", "block_tables", "tree_mask"])
def test_metadata_changed_in_place_is_noticed(name: str) -> None:
    """Data that an implementation keeps of a step for the next layer must not outlive the numbers that it came from."""
    sequences = Model(block_size=8).random_sequences(2, 40)
    parts, mask = [Part(0, 20, 3), Part(1, 9, 3)], pack_bits(torch.ones(6, 3).bool().tolist(), 1)
    changed = {
        "cu_q_lens": torch.tensor([0, 2, 6], dtype=torch.int32),
        "kv_lens": torch.tensor([20, 12], dtype=torch.int32),
        "block_tables": sequences.batch(parts).block_tables.flip(0),
        "tree_mask": torch.tensor([[1], [2], [4]] * 2, dtype=torch.int32),
    }[name]
    expected = replace(sequences.batch(parts, mask, poison=0.0), **{name: changed}).run()
    batch = sequences.batch(parts, mask, poison=0.0)
    kept = batch.k_cache.clone(), batch.v_cache.clone()
    before = batch.run()
    batch.k_cache.copy_(kept[0])
    batch.v_cache.copy_(kept[1])
    getattr(batch, name).copy_(changed)
    after = batch.run()
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_other_options_with_the_same_metadata_are_noticed() -> None:
    """A call with other options and the same metadata is right: windows differ from layer to layer."""
    sequences = Model().random_sequences(1, 300)
    batch = sequences.batch([Part(0, 280, 3)])
    for window in (0, 5, 0, 17, 5):
        windowed = replace(sequences, model=replace(sequences.model, window=window))
        assert_near(replace(batch, window=window).run(), dense(windowed, Part(0, 280, 3)))


# --- the registered op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["spec_attention", "spec_attention_"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "tree_and_sinks"])
def test_opcheck(form: str, options: bool) -> None:
    sequences = Model(sinks=options).random_sequences(2, 40)
    parts = [Part(0, 20, 3), Part(1, 0, 2)]
    mask = torch.full((5, 1), -1, dtype=torch.int32) if options else None
    batch = sequences.batch(parts, mask, poison=0.0)
    op = getattr(torch.ops.trtspec, form).default
    arguments = (*batch.tensors, math.sqrt(0.5), 5, 2.0)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
