"""C++ spec_attention and kv_compact against the references, for any instruction set that TRTSPEC_CPU_ISA names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.attention_cases import Batch, Model, Part, pack_bits
from tests.unit.test_ops_compact import Case, Request
from tests.unit.test_ops_compact import requests as compacted
from trtspec.ops import kv_compact, kv_compact_, load_plugins, spec_attention_
from trtspec.ops.attention import _reference_ as reference
from trtspec.ops.attention import row_slots
from trtspec.ops.compact import _reference_ as compact_reference

# Both sides compute in fp32, in different orders. Outputs in half precision may then differ by one unit.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ABSOLUTE = 5e-6
TILE = 64  # the kernel's
LONGEST = 340


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    if "cpu" not in load_plugins():
        pytest.skip("the C++ kernels are not built (python -m trtspec_plugins.cpu)")


@st.composite
def models(draw: st.DrawFn) -> Model:
    kv_heads = draw(st.integers(1, 3))
    return Model(
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 2, 5, 16, 20, 31, 32, 48, 64, 80, 96, 128, 161])),
        dtype=draw(st.sampled_from(list(RELATIVE))),
        block_size=draw(st.sampled_from([1, 3, 16, 64, 100])),
        window=draw(st.sampled_from([0, 0, 1, 17, 64, 200, 10**12])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.5, 30.0])),
        sinks=draw(st.booleans()),
    )


edges = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 300]) | st.integers(0, 300)
batches = st.lists(st.builds(Part, st.integers(0, 2), edges, st.integers(0, 40)), min_size=1, max_size=4)


def tree_of(parts: Sequence[Part], density: float, seed: int) -> Tensor:
    """Return a packed mask of random bits, in which every row sees itself."""
    g = torch.Generator().manual_seed(seed)
    words = max(1, *(-(-part.num_rows // 32) for part in parts))
    flags = [(torch.rand(p.num_rows, p.num_rows, generator=g) < density).fill_diagonal_(True) for p in parts]
    return torch.cat([pack_bits(f.tolist(), words).view(-1, words) for f in flags])


def fused(batch: Batch, gap: int) -> Batch:
    """Return the same rows as views of one tensor, with heads `gap` elements apart."""
    q, k, v = batch.q, batch.k, batch.v
    T, D = q.shape[0], q.shape[2]
    qkv = torch.full((T, q.shape[1] + 2 * k.shape[1], D + gap), float("nan"), dtype=q.dtype)
    qkv[..., :D] = torch.cat((q, k, v), 1)
    q, k, v = qkv[..., :D].split([q.shape[1], k.shape[1], v.shape[1]], 1)
    return replace(batch, q=q, k=k, v=v)


def expected(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reference's output and caches."""
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    tensors = (batch.q, batch.k, batch.v, k_cache, v_cache, *batch.tensors[5:])
    return reference(*tensors, *batch.settings), k_cache, v_cache


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=RELATIVE[ours.dtype], atol=ABSOLUTE, equal_nan=True)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Check that both have the same bits, including the sign of zeros; any NaN equals any other."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())


# --- against the reference --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    model=models(),
    parts=batches,
    density=st.sampled_from([None, None, 0.05, 0.5, 0.95]),
    gap=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 2**31),
)
def test_like_the_reference(model: Model, parts: list[Part], density: float | None, gap: int | None, seed: int) -> None:
    assume(any(part.num_rows for part in parts))
    sequences = model.random_sequences(3, LONGEST, seed)
    batch = sequences.batch(parts, None if density is None else tree_of(parts, density, seed))
    theirs, k_cache, v_cache = expected(batch)
    ours = (batch if gap is None else fused(batch, gap)).run()
    assert_near(ours, theirs)
    assert_same(batch.k_cache, k_cache)
    assert_same(batch.v_cache, v_cache)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 5.0, 1e3])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_every_size(scale: float, softcap: float, sinks: bool) -> None:
    """Weights range from all alike to one that is 1 among zeros; tanh ranges from its linear part to 1."""
    sequences = Model(head_dim=32, softcap=softcap, sinks=sinks).random_sequences(2, 300)
    batch = replace(sequences.batch([Part(0, 280, 6), Part(1, 0, 70)]), scale=scale)
    theirs = expected(batch)[0]
    # The rounding error of a score grows with its size.
    torch.testing.assert_close(batch.run(), theirs, rtol=1e-5 + 1e-6 * scale, atol=5e-6 + 2e-6 * scale)


def test_heads_that_are_not_dense_are_copied() -> None:
    sequences = Model().random_sequences(1, 50)
    batch = sequences.batch([Part(0, 30, 5)])
    theirs = expected(batch)[0]
    turned = replace(batch, **{name: getattr(batch, name).mT.contiguous().mT for name in ("q", "k", "v")})
    assert turned.q.stride(2) != 1
    assert_near(turned.run(), theirs)


def test_tables_may_be_views() -> None:
    sequences = Model(block_size=4).random_sequences(2, 60)
    parts = [Part(0, 30, 5), Part(1, 50, 3)]
    batch = sequences.batch(parts, tree_of(parts, 0.5, 0))
    theirs = expected(batch)[0]
    wide = torch.nn.functional.pad(batch.block_tables, (0, 3), value=10**6)[:, :-3]
    tall = batch.block_tables.T.contiguous().T
    mask = torch.nn.functional.pad(batch.tree_mask, (0, 2))[:, :-2]
    for tables in (wide, tall):
        assert_near(replace(batch, block_tables=tables, tree_mask=mask).run(), theirs)


# --- a row's bits -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    model=models(),
    cuts=st.lists(edges, max_size=5),
    neighbours=st.lists(st.builds(Part, st.integers(0, 2), edges, st.integers(0, 40)), max_size=3),
    turn=st.integers(0, 3),
)
def test_a_row_has_the_same_bits_in_every_chunking_and_company(
    model: Model, cuts: list[int], neighbours: list[Part], turn: int
) -> None:
    sequences = model.random_sequences(3, LONGEST)
    whole = sequences.attend([Part(0, 0, LONGEST)])[0]
    for start, end in pairwise(sorted({0, *cuts, LONGEST})):
        place = turn % (len(neighbours) + 1)
        parts = [*neighbours[:place], Part(0, start, end - start), *neighbours[place:]]
        assert_same(sequences.attend(parts)[place], whole[start:end])


@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
@pytest.mark.parametrize("num_rows", [*range(2, 10), 17])
def test_a_row_has_the_same_bits_alone_and_with_its_drafts(dtype: torch.dtype, num_rows: int) -> None:
    sequences = Model(heads=6, kv_heads=2, head_dim=64, dtype=dtype).random_sequences(1, TILE + 30)
    for start in (0, 3, TILE - num_rows, TILE - 1, TILE, TILE + 1):
        together = sequences.attend([Part(0, start, num_rows)])[0]
        for i in range(num_rows):
            assert_same(sequences.attend([Part(0, start + i, 1)])[0], together[i : i + 1])


def test_a_chain_as_a_tree_is_causal_bit_for_bit() -> None:
    sequences = Model(window=70, dtype=torch.bfloat16).random_sequences(2, LONGEST)
    parts = [Part(0, 250, 70), Part(1, 0, 5)]
    flags = [torch.ones(part.num_rows, part.num_rows).tril().bool() for part in parts]
    tree_mask = torch.cat([pack_bits(f.tolist(), 3) for f in flags])
    for tree, causal in zip(sequences.attend(parts, tree_mask), sequences.attend(parts), strict=True):
        assert_same(tree, causal)


@pytest.mark.parametrize("width", [1, 40])
def test_wider_tables_change_nothing(width: int) -> None:
    sequences = Model().random_sequences(2, LONGEST)
    parts = [Part(0, 300, 4), Part(1, 10, 2)]
    narrow, wide = sequences.batch(parts), sequences.batch(parts)
    wide = replace(wide, block_tables=torch.nn.functional.pad(wide.block_tables, (0, width)))
    assert_same(wide.run(), narrow.run())


@pytest.mark.usefixtures("two_threads")
@settings(max_examples=10, deadline=None)
@given(dtype=st.sampled_from(list(RELATIVE)), parts=batches)
def test_two_threads_give_the_bits_of_one(dtype: torch.dtype, parts: list[Part]) -> None:
    """Two threads compute the bits of one; 300 rows next to the drawn ones give work to both."""
    parts = [Part(0, 0, 300), *parts]
    sequences = Model(head_dim=64, dtype=dtype).random_sequences(3, LONGEST)
    two = sequences.batch(parts)
    out = two.run()
    torch.set_num_threads(1)
    one = sequences.batch(parts)
    assert_same(one.run(), out)
    torch.set_num_threads(2)
    assert_same(one.k_cache[1:], two.k_cache[1:])


# --- poison -----------------------------------------------------------------------------------------------------------

POISON = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
@pytest.mark.parametrize("head_dim", [16, 7, 128])
def test_a_later_row_reaches_none_before_it(poison: float, which: str, dtype: torch.dtype, head_dim: int) -> None:
    sequences = Model(head_dim=head_dim, dtype=dtype).random_sequences(2, LONGEST)
    parts = [Part(0, 250, 80), Part(1, 0, 2)]
    clean = sequences.attend(parts)
    getattr(sequences, which)[0, 254, 1, 3] = poison  # row 4, KV head 1
    out, other = sequences.attend(parts)
    assert_same(out[:4], clean[0][:4])
    assert_same(out[:, :2], clean[0][:, :2])  # query heads of KV head 0
    assert_same(other, clean[1])
    if which == "v":
        assert not out[4:, 2:, 3].isfinite().any()


@pytest.mark.parametrize("poison", POISON)
def test_nothing_outside_window_or_branch_reaches_a_row(poison: float) -> None:
    sequences = Model(window=10).random_sequences(1, LONGEST)
    parts, mask = [Part(0, 290, 6)], pack_bits(torch.eye(6).bool().tolist(), 1)
    clean, clean_tree = sequences.attend(parts)[0], sequences.attend(parts, mask)[0]
    for x in (sequences.k, sequences.v):
        x[0, 282] = x[0, 293] = poison  # seen by rows up to 1, and from row 3 on
    assert_same(sequences.attend(parts)[0][2], clean[2])
    others = [2, 4, 5]
    assert_same(sequences.attend(parts, mask)[0][others], clean_tree[others])


def test_junk_requests_harm_no_other() -> None:
    """Padding requests harm no other request, if their length fits no table or is less than their number of rows."""
    sequences = Model(block_size=8).random_sequences(3, LONGEST)
    parts = [Part(0, 20, 3), Part(1, 100, 5), Part(2, 60, 4)]
    clean = sequences.attend(parts)
    for length in (-(2**31), -7, 0, 2, 900):
        batch = sequences.batch(parts, poison=0.0)
        batch.kv_lens[1] = length
        out = batch.run().split([3, 5, 4])
        assert_same(out[0], clean[0])
        assert_same(out[2], clean[2])


def test_no_rows_at_all() -> None:
    batch = Model().random_sequences(1, 10).batch([Part(0, 5, 0)])
    assert batch.run().shape == batch.q.shape


# --- kv_compact -------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    drawn=st.lists(compacted, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 3, 16]),
    dtype=st.sampled_from(list(RELATIVE)),
)
def test_compact_like_the_reference(drawn: list[Request], block_size: int, dtype: torch.dtype) -> None:
    """kv_compact equals the reference in all rows of both caches, apart from scratch."""
    case = Case.of(drawn, block_size, dtype)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    compact_reference(k_cache, v_cache, *case.arguments()[2:])
    new_k, new_v = kv_compact(*case.arguments())
    kv_compact_(*case.arguments())
    for ours, theirs in ((case.k_cache, k_cache), (case.v_cache, v_cache), (new_k, k_cache), (new_v, v_cache)):
        assert torch.equal(ours[1:], theirs[1:])


@pytest.mark.parametrize("start", [-5, 30, 2**31 - 1])
@pytest.mark.parametrize("row", [3, 2**62])
def test_compact_stays_within_the_caches(start: int, row: int) -> None:
    """Positions that no table covers are scratch, and the other request is served."""
    case = Case.of([Request(7, [1, 4, 5]), Request(0, [2])], block_size=4)
    expected = case.expected(case.k_cache)
    case.starts[1], case.path[1, 0] = start, row
    kv_compact_(*case.arguments())
    assert torch.equal(case.k_cache[case.block_tables[0]], expected[case.block_tables[0]])


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_len", [-(2**31), -1, 0, 7])
def test_lengths_that_make_no_sense_touch_nothing_but_scratch(kv_len: int) -> None:
    """A request with fewer tokens than rows changes only scratch and the slots of its tokens.

    It has so many rows that they are several pieces of work.
    """
    batch = Model().random_sequences(1, 240).batch([Part(0, 0, 200)])
    batch = replace(batch, kv_lens=torch.tensor([kv_len], dtype=torch.int32))
    before = batch.k_cache.clone()
    batch.run()
    size, positions = batch.k_cache.shape[1], torch.arange(max(kv_len, 0))
    kept = row_slots(batch.block_tables, torch.zeros_like(positions), positions, size)
    differs = (batch.k_cache != before) & ~(batch.k_cache.isnan() & before.isnan())
    changed = differs.flatten(0, 1).flatten(1).any(1).nonzero()[:, 0]
    assert set(changed.tolist()) <= {*range(size), *kept.tolist()}


def test_caches_whose_strides_of_size_1_are_odd() -> None:
    """Caches with odd strides of size-1 dimensions give the same results.

    is_contiguous() holds for them, here for blocks of one slot.
    """
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    lens = [torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [3])]
    tables, none = torch.tensor([[5, 6, 7]], dtype=torch.int32), torch.empty(0)
    results = []
    for caches in ([torch.zeros(8, 1, 2, 16) for _ in "kv"], [torch.zeros(1, 8, 2, 16).transpose(0, 1) for _ in "kv"]):
        assert all(cache.is_contiguous() for cache in caches)
        out = spec_attention_(q, k, v, *caches, *lens, tables, none.int(), none, 0.25)
        kv_compact_(*caches, tables, torch.tensor([0], dtype=torch.int32), torch.tensor([[1, 2]]))
        results.append((out, *caches))
    assert all(torch.equal(usual, odd) for usual, odd in zip(*results, strict=True))
    assert results[0][1].any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[:, :3]),
        ("q", lambda x: x[:, :0]),
        ("q", lambda x: x[..., :8]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x[0]),
        ("k", lambda x: x[:4]),
        ("k", lambda x: x[:, :1]),
        ("v", lambda x: x.half()),
        ("v", lambda x: x[:, :1]),
        ("k_cache", lambda x: x.double()),
        ("k_cache", lambda x: x[0]),
        ("k_cache", lambda x: x.mT.contiguous().mT),
        ("v_cache", lambda x: x[:2]),
        ("v_cache", lambda x: x.half()),
        ("cu_q_lens", lambda x: x.long()),
        ("cu_q_lens", lambda x: x[:-1]),
        ("cu_q_lens", lambda x: x + 1),
        ("cu_q_lens", lambda x: torch.tensor([0, 6, 5], dtype=torch.int32)),
        ("kv_lens", lambda x: x.float()),
        ("kv_lens", lambda x: x[:, None]),
        ("block_tables", lambda x: x.long()),
        ("block_tables", lambda x: x[:1]),
        ("block_tables", lambda x: x[:, :0]),
        ("block_tables", lambda x: x + 1000),
        ("block_tables", lambda x: x - 1000),
        ("tree_mask", lambda x: torch.ones(4, 1, dtype=torch.int32)),
        ("tree_mask", lambda x: torch.ones(5, 1, dtype=torch.int64)),
        ("sinks", lambda x: torch.ones(3)),
    ],
)
def test_bad_arguments_are_named(name: str, change: Callable[[Tensor], Tensor]) -> None:
    batch = Model().random_sequences(2, 40).batch([Part(0, 20, 3), Part(1, 0, 2)])
    batch = replace(batch, **{name: change(getattr(batch, name))})
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        batch.run()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_cache", lambda x: x.double()),
        ("v_cache", lambda x: x[1:]),
        ("block_tables", lambda x: x.long()),
        ("block_tables", lambda x: x[:1]),
        ("block_tables", lambda x: x + 1000),
        ("starts", lambda x: x.long()),
        ("path", lambda x: x.int()),
        ("path", lambda x: x[:1]),
    ],
)
def test_bad_arguments_of_compact_are_named(name: str, change: Callable[[Tensor], Tensor]) -> None:
    case = Case.of([Request(7, [1, 4, 5]), Request(0, [2])], block_size=4)
    case = replace(case, **{name: change(getattr(case, name))})
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        kv_compact_(*case.arguments())
