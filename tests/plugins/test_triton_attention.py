"""spec_attention's Triton kernels against the reference, in Triton's interpreter (make test runs these).

The reference adds in another order, so results are equal within a tolerance. Where rows are compared bit for bit, one
of the two runs has them in another place of a matrix. The interpreter's product is the CPU's, which may round a
matrix's rows differently. So those tests have values whose sums are exact, or matrices of one shape with the same
contents.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

import trtspec_plugins.triton.attention as attention

from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from tests.plugins.references import reference

CHUNK = 64  # in the tests: one tile, so that short caches have several chunks
# For values of order 1: fp32 sums of a few hundred products; fp16 outputs and weights have 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
Arguments = dict[str, Any]


def launch(arguments: Arguments, split: bool = False, chunk: int = CHUNK) -> Tensor:
    """Launch the op in its split form or in the other; the arguments' caches are changed."""
    programs = 1 << 30 if split else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_BELOW", programs)
        patch.setattr(attention, "CHUNK", chunk)
        return attention.spec_attention_(**arguments)


def clone(arguments: Arguments) -> Arguments:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def check(arguments: Arguments, split: bool) -> Tensor:
    """Check that output and caches are the reference's -> output."""
    wanted = reference("spec_attention", **arguments)
    mine = clone(arguments)
    out = launch(mine, split)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, wanted[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    for cache, expected in zip((mine["k_cache"], mine["v_cache"]), wanted[1:], strict=True):
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    return out


def batch(
    new: list[int],
    kv_lens: list[int],
    heads: tuple[int, int] = (6, 2),
    width: int = 16,
    block_size: int = 16,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Arguments:
    """Return requests with `new` rows each, the last of kv_lens tokens, in blocks scattered over the pool; causal."""
    g = torch.Generator().manual_seed(seed)
    columns = max(-(-length // block_size) for length in kv_lens)
    blocks = len(new) * columns + 1
    step = torch.randn(2, sum(new), heads[1], width, generator=g).to(dtype)
    caches = torch.randn(2, blocks, block_size, heads[1], width, generator=g).to(dtype)
    return {
        "q": torch.randn(sum(new), heads[0], width, generator=g).to(dtype),
        "k": step[0],
        "v": step[1],
        "k_cache": caches[0].clone(),
        "v_cache": caches[1].clone(),
        "cu_q_lens": torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "block_tables": (torch.randperm(blocks - 1, generator=g) + 1).view(len(new), columns).to(torch.int32),
        "tree_mask": torch.empty(0, dtype=torch.int32),
        "sinks": torch.empty(0),
        "scale": 0.3,
        "window": 0,
        "softcap": 0.0,
    }


def pack(rows: list[list[int]], words: int) -> Tensor:
    """Pack, for each row, the new rows that it sees -> [T, words] int32."""
    bits = torch.zeros(len(rows), words * 32, dtype=torch.int64)
    for row, seen in enumerate(rows):
        bits[row, seen] = 1
    return (bits.view(len(rows), words, 32) << torch.arange(32)).sum(-1).to(torch.int32)


@st.composite
def tree_masks(draw: st.DrawFn, new: list[int], words: int) -> Tensor:
    """Draw trees whose nodes see their ancestors and themselves, or any bits, also for later and for missing rows."""
    if draw(st.booleans()):
        g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        return torch.randint(-(2**31), 2**31, (sum(new), words), generator=g).to(torch.int32)
    rows: list[list[int]] = []
    for length in new:
        seen: list[list[int]] = []
        for node in range(length):
            parent = draw(st.integers(-1, node - 1))
            seen.append([*(seen[parent] if parent >= 0 else []), node])
        rows += seen
    return pack(rows, words)


@st.composite
def ragged(draw: st.DrawFn) -> Arguments:
    """Draw up to 3 requests of up to 5 rows, with up to 150 tokens and every option."""
    new = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    committed = st.sampled_from([0, 1, 59, 63, 64, 128]) | st.integers(0, 140)
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 7]))
    arguments = batch(
        new,
        [rows + draw(committed) for rows in new],
        (kv_heads * group, kv_heads),
        draw(st.sampled_from([8, 16, 20, 24])),
        draw(st.sampled_from([1, 4, 7, 16, 64])),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from(list(TOLERANCE))),
    )
    if draw(st.booleans()):
        arguments["tree_mask"] = draw(tree_masks(new, draw(st.integers(1, 2))))
    if draw(st.booleans()):
        arguments["sinks"] = torch.linspace(-2, 4, kv_heads * group)
    arguments["window"] = draw(st.sampled_from([0, 0, 1, 5, 70]))
    arguments["softcap"] = draw(st.sampled_from([0.0, 5.0]))
    return arguments


@settings(deadline=None, max_examples=30)
@given(ragged(), st.booleans())
def test_attention_is_the_reference_s(arguments: Arguments, split: bool) -> None:
    check(arguments, split)


both_forms = pytest.mark.parametrize("split", [False, True])


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_many_rows_over_several_tiles(split: bool, dtype: torch.dtype) -> None:
    """Matrices of 32 rows and several programs per request: 9 and 26 rows of 3 query heads each."""
    arguments = batch([1, 9, 26], [200, 64, 70], (3, 1), dtype=dtype)
    check(arguments | {"softcap": 20.0}, split)
    check(arguments | {"window": 30, "sinks": torch.tensor([0.0, 1.0, -3.0])}, split)


@both_forms
def test_more_query_heads_than_a_program_has_rows(split: bool) -> None:
    """67 query heads share one KV head, so rows begin and end within a program."""
    check(batch([2, 1], [70, 5], (67, 1)), split)


@both_forms
def test_trees_of_more_nodes_than_a_word_has_bits(split: bool) -> None:
    """The first row's bits lie in three words, for 80 new rows in three tiles; the others see only themselves."""
    rows = [[row] for row in range(80)]
    rows[0] = list(range(0, 80, 3))
    out = check(batch([80], [99], (1, 1)) | {"tree_mask": pack(rows, 3)}, split)
    rows[0].remove(66)
    assert not torch.equal(check(batch([80], [99], (1, 1)) | {"tree_mask": pack(rows, 3)}, split)[0], out[0])


def test_a_long_cache_has_chunks_of_two_sizes() -> None:
    """1100 keys are 16 chunks of 64 and one of 128; both forms return the same bits."""
    arguments = batch([2], [1100], (2, 1))
    assert torch.equal(check(arguments, split=True), check(arguments, split=False))


@pytest.mark.parametrize(("length", "count"), [(1, 1), (256, 1), (257, 2), (4096, 16), (4097, 17), (131072, 81)])
def test_chunks_double_in_size_after_every_16(length: int, count: int) -> None:
    assert attention.chunks_of(length) == count
    begins = [attention.chunk_start.fn(chunk, 256) for chunk in range(count + 1)]
    sizes = [end - begin for begin, end in pairwise(begins)]
    assert sizes == [256 << (chunk // 16) for chunk in range(count)]


# --- a row's bits are its own -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(ragged())
def test_both_forms_give_the_same_bits(arguments: Arguments) -> None:
    """Both forms return the same bits.

    The matrices have one shape and the same contents, so the interpreter multiplies them alike.
    """
    whole, split = clone(arguments), clone(arguments)
    assert torch.equal(bits(launch(whole)), bits(launch(split, split=True)))
    assert torch.equal(whole["k_cache"], split["k_cache"])


def bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that NaN equals itself and zeros of different sign differ."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def exact(new: list[int], kv_lens: list[int]) -> Arguments:
    """Return requests whose sums are exact within a tile, while the order of the tiles shows in the bits.

    Scores are equal within a tile, so weights there are 1. From tile to tile, scores go up or down, depending on the
    head. So the bits show the factors of the tiles' sums and the order in which these are added.
    """
    arguments = batch(new, kv_lens, (3, 1))
    caches = arguments["k_cache"], arguments["v_cache"]
    keys, values = (cache.view(-1, 16) for cache in caches)
    integers = torch.randint(-9, 9, (max(kv_lens), 16), generator=torch.Generator().manual_seed(1)).float()
    arguments["q"].zero_()
    arguments["q"][..., 0] = torch.tensor([0.7, -0.4, 1.9])
    for request, (rows, length) in enumerate(zip(new, kv_lens, strict=True)):
        position = torch.arange(length)
        key = torch.zeros(length, 16)
        key[:, 0] = position // CHUNK
        first = int(arguments["cu_q_lens"][request])
        slots = arguments["block_tables"][request, position // 16].long() * 16 + position % 16
        keys[slots], values[slots] = key, integers[:length]
        arguments["k"][first : first + rows, 0] = key[length - rows :]
        arguments["v"][first : first + rows, 0] = integers[length - rows : length]
    return arguments


def alone(arguments: Arguments, request: int, row: int) -> Arguments:
    """Return the same row as a request of one row; the rows that it saw of its step are in the cache."""
    packed = int(arguments["cu_q_lens"][request]) + row
    after = int(arguments["cu_q_lens"][request + 1]) - packed - 1  # rows that follow it
    return arguments | {
        **{name: arguments[name][packed : packed + 1] for name in ("q", "k", "v")},
        "cu_q_lens": torch.tensor([0, 1], dtype=torch.int32),
        "kv_lens": arguments["kv_lens"][request : request + 1] - after,
        "block_tables": arguments["block_tables"][request : request + 1],
    }


@both_forms
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.long), 70])
def test_a_row_s_bits_do_not_depend_on_its_neighbours(split: bool, window: int) -> None:
    """A row has the same bits among the rows of its request and alone, in either form.

    Rows are among 3, 24 and 5 of their request (matrices of 32 rows) or alone (16). Alone, a row has other chunks next
    to it, and keys from the cache instead of the step.
    """
    arguments = exact([3, 24, 5], [131, 200, 66]) | {"window": window}
    out = launch(arguments, split)
    for request, row in ((0, 0), (0, 2), (1, 0), (1, 11), (1, 23), (2, 1), (2, 4)):
        packed = int(arguments["cu_q_lens"][request]) + row
        for form in (False, True):
            assert torch.equal(bits(launch(alone(arguments, request, row), form)[0]), bits(out[packed]))


@both_forms
def test_exact_values_tell_orders_apart(split: bool) -> None:
    """Other chunks give other bits; otherwise the test above would not be worth much."""
    arguments = exact([3], [200])
    narrow, wide = launch(clone(arguments), split), launch(clone(arguments), split, chunk=128)
    torch.testing.assert_close(narrow, wide)
    assert not torch.equal(narrow, wide)


# --- values that are not finite, rows that are not covered, wrong metadata --------------------------------------------


@both_forms
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.long)])
def test_what_a_later_row_holds_does_not_reach_an_earlier_one(split: bool, bad: float) -> None:
    arguments = batch([1, 4, 9], [150, 130, 64])
    arguments["v"][4, 0, 5] = bad  # the last of the second request's four rows
    arguments["k"][12] = bad  # a row of the third request; it and the next row see it
    arguments["v_cache"][arguments["block_tables"][0, -1].long(), 9:] = bad  # past the end of the first request
    out = check(arguments, split)
    assert out.isnan().flatten(1).any(1).nonzero()[:, 0].tolist() == [4, 12, 13]
    assert out[4, :3].isnan().all()  # the whole row of that KV head, as a sum of weights is NaN
    assert out[4, 3:].isfinite().all()


@both_forms
def test_a_value_that_is_not_finite_spoils_those_alone_who_see_it(split: bool) -> None:
    """A value that is not finite spoils only the rows that see it; the bits of the others stay.

    In the tree it is a sibling's value, in the window one that only the earlier row still sees.
    """
    arguments = batch([3], [100], (3, 1)) | {"tree_mask": pack([[0], [0, 1], [0, 2]], 1), "window": 40}
    clean = launch(clone(arguments), split)
    arguments["v"][1, 0, 3] = float("nan")
    arguments["v_cache"][arguments["block_tables"][0, 58 // 16].long(), 58 % 16, 0, 7] = float("inf")  # row 0 sees it
    out = launch(arguments, split)
    assert out[:2].isnan().all()
    assert torch.equal(bits(out[2]), bits(clean[2]))


@both_forms
def test_rows_that_no_column_covers_go_to_scratch(split: bool) -> None:
    """Rows that no column covers go to scratch: there are 192 slots for 200 tokens.

    The memory after the table leads to a block of NaN.
    """
    arguments = batch([4, 1], [130, 200])
    covered, beyond = arguments["block_tables"][:, :12], arguments["block_tables"][0, 12:].repeat(20)
    arguments["block_tables"] = torch.cat([covered.flatten(), beyond])[:24].view(2, 12)
    arguments["k_cache"][beyond[0]] = arguments["v_cache"][beyond[0]] = float("nan")
    before = arguments["k_cache"].clone()
    out = launch(arguments, split)
    assert torch.equal(arguments["k_cache"][0, 199 % 16], arguments["k"][4])
    assert torch.equal(arguments["k_cache"][0, :7], before[0, :7])
    assert out.isfinite().all()


@both_forms
def test_slices_of_one_tensor_are_taken_as_they_are(split: bool) -> None:
    """q, k and v may be slices of [T, Hq + 2 Hkv, D], or of a tensor whose heads are apart, which is copied."""
    arguments = batch([2, 3], [70, 20])
    wanted = launch(clone(arguments), split)
    heads = torch.cat([arguments["q"], arguments["k"], arguments["v"]], dim=1)
    sliced = dict(zip(("q", "k", "v"), heads.split([6, 2, 2], dim=1), strict=True))
    assert torch.equal(launch(clone(arguments) | sliced, split), wanted)
    apart = {name: arguments[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "k", "v")}
    assert torch.equal(launch(clone(arguments) | apart, split), wanted)


def test_caches_that_are_not_contiguous_are_refused() -> None:
    arguments = batch([1], [3])
    arguments["v_cache"] = arguments["v_cache"].transpose(1, 2)
    with pytest.raises(ValueError, match="caches that are contiguous"):
        launch(arguments)


def test_no_rows_are_no_launch() -> None:
    arguments = batch([1], [3])
    arguments |= {name: arguments[name][:0] for name in ("q", "k", "v")}
    assert launch(arguments).shape == (0, 6, 16)


anything = st.integers(-(2**31), 2**31 - 1) | st.integers(-100, 300)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans())
def test_no_metadata_leads_past_the_tensors(data: st.DataObject, split: bool) -> None:
    """Wild numbers change only the tensors that are written to; a stray access would end this process."""
    B, T, columns = 2, 3, 20
    guarded = torch.full((4, 5, 4, 1, 16), 7.0)  # k_cache and v_cache, between two walls
    q = torch.ones(T, 2, 16)
    numbers = {
        name: torch.tensor([data.draw(anything) for _ in range(count)], dtype=torch.int64).to(torch.int32)
        for name, count in (("cu_q_lens", B + 1), ("kv_lens", B), ("block_tables", columns))
    }
    numbers["block_tables"] = numbers["block_tables"].repeat(B, 1)
    launch(
        {
            **{"q": q, "k": q[:, :1].clone(), "v": q[:, :1].clone(), "k_cache": guarded[1], "v_cache": guarded[2]},
            **numbers,
            "tree_mask": torch.tensor([[1], [-1], [6]] if data.draw(st.booleans()) else [], dtype=torch.int32),
            "sinks": torch.empty(0),
            "scale": 1.0,
            "window": data.draw(st.sampled_from([0, 3])),
        },
        split,
    )
    assert (guarded[0] == 7).all()
    assert (guarded[3] == 7).all()
    assert ((guarded == 7) | (guarded == 1)).all()
