"""process_logits in C++: it keeps the tokens that the reference keeps, with the same values.

One difference is allowed. Top-p and min-p compare sums and ratios of exponentials, which both sides round in their own
order. A token whose sum or ratio lies within BOUNDARY of the bound may be kept by one side and not by the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import load_plugins, process_logits
from trtspec.ops.logits import _reference
from trtspec.sampling_params import NEVER

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

INF, NAN = float("inf"), float("nan")
NO_INT, NO_FLOAT = torch.empty(0, dtype=torch.int32), torch.empty(0)
BOUNDARY = 2e-5  # share of the whole mass (top-p), or of the ratio to the likeliest token (min-p)

numbers = st.integers(0, 2**31)
vocabs = st.one_of(st.integers(1, 100), st.sampled_from([127, 128, 129, 1000, 4096, 5003]))
shapes = st.sampled_from(["flat", "tied", "near", "normal", "steep", "peak", "masked", "huge"])
group_names = ["penalties", "bias", "bans", "mask", "temperature", "top_k", "top_p", "min_p"]


def generator_of(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def random_logits(shape: str, rows: int, vocab: int, number: int) -> Tensor:
    generator = generator_of(number)
    normal = torch.randn(rows, vocab, generator=generator)
    peaks = torch.randint(vocab, (rows, 1), generator=generator)
    kept = torch.rand(rows, vocab, generator=generator) < 0.05
    return {
        "flat": torch.full((rows, vocab), 1.5),
        "tied": (3 * normal).round(),
        "near": 0.01 * normal,
        "normal": 3 * normal,
        "steep": 40 * normal,
        "peak": normal.scatter(1, peaks, 20.0),
        "masked": normal.masked_fill(~kept, -INF),  # also whole rows
        "huge": 1e7 * normal,
    }[shape]


def pick(values: Sequence[float], rows: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]


def random_group(name: str, rows: int, vocab: int, number: int) -> dict[str, Tensor]:
    """Return one group with a different setting in each row; it is off in some rows."""
    generator = generator_of(number)

    def ids(width: int) -> Tensor:
        return torch.randint(-1, vocab, (rows, width), generator=generator, dtype=torch.int32)

    match name:
        case "penalties":
            columns = [pick([0.5, 1.0, 1.3], rows, generator), pick([0.0, 0.7, -1.0], rows, generator)]
            columns.append(pick([0.0, 0.2, -0.3], rows, generator))
            lens = torch.randint(0, 30, (rows,), generator=generator, dtype=torch.int32)
            return {"history": ids(29), "prompt_lens": lens, "penalties": torch.stack(columns, dim=1)}
        case "bias":
            values = torch.randn(rows, 7, generator=generator)
            return {"bias_ids": ids(7), "bias_values": values.masked_fill(values > 1.5, -INF)}
        case "bans":
            until = pick([0, 5, 6, NEVER], rows * 4, generator, torch.int64).view(rows, 4)
            return {"ban_ids": ids(4), "ban_until": until}
        case "mask":
            words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator, dtype=torch.int64)
            return {"allow_mask": words.int()}
        case "temperature":
            return {"temperatures": pick([-1.0, 0.0, 0.3, 0.8, 1.0, 7.0], rows, generator)}
        case "top_k":
            ks = [-1, 0, 1, 2, 5, 50, vocab - 1, vocab, vocab + 1, 2**31 - 1]
            return {"top_ks": pick(ks, rows, generator, torch.int32)}
        case "top_p":
            return {"top_ps": pick([-0.5, 0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 1 - 2**-24, 1.0, 2.0], rows, generator)}
        case "min_p":
            return {"min_ps": pick([-1.0, 0.0, 1e-9, 0.02, 0.3, 1.0, 1.5], rows, generator)}
    raise AssertionError(name)


def arguments(logits: Tensor, **groups: Tensor) -> dict[str, Tensor]:
    """Return all arguments; every group that is not named is zero-size. Every row draws the token at position 5."""
    unused = {
        "positions": torch.full((len(logits),), 5),
        "history": NO_INT,
        "prompt_lens": NO_INT,
        "penalties": NO_FLOAT,
        "bias_ids": NO_INT,
        "bias_values": NO_FLOAT,
        "ban_ids": NO_INT,
        "ban_until": NO_INT.long(),
        "allow_mask": NO_INT,
        "temperatures": NO_FLOAT,
        "top_ks": NO_INT,
        "top_ps": NO_FLOAT,
        "min_ps": NO_FLOAT,
    }
    return {"logits": logits, **unused, **groups}


def near_a_boundary(value: Tensor, before: Tensor, top_p: float, min_p: float) -> bool:
    """Whether this value of a row may be kept or not. before [V]: input of top-p and min-p, in double precision."""
    mass = before.softmax(0)
    upto = mass[before <= value].sum()
    below = mass[before < value].sum()
    at_top_p = top_p < 1 and min((upto - (1 - top_p)).abs(), (below - (1 - top_p)).abs()) < BOUNDARY
    ratio = (value - before.max()).exp()
    return bool(at_top_p or (min_p > 0 and (ratio - min_p).abs() < BOUNDARY * min_p))


def check(logits: Tensor, groups: dict[str, Tensor]) -> None:
    given_ = arguments(logits, **groups)
    ours, reference = process_logits(**given_), _reference(**given_)
    before = _reference(**{**given_, "top_ps": NO_FLOAT, "min_ps": NO_FLOAT})
    differs = (ours != reference) & ~(ours.isnan() & reference.isnan())
    for row, column in differs.nonzero().tolist():
        top_p = given_["top_ps"][row].item() if "top_ps" in groups else 1.0
        min_p = given_["min_ps"][row].item() if "min_ps" in groups else 0.0
        value = before[row, column]
        assert {ours[row, column].item(), reference[row, column].item()} == {-INF, value.item()}
        assert near_a_boundary(value.double(), before[row].double(), top_p, min_p)


@pytest.mark.parametrize("name", group_names)
@settings(max_examples=60, deadline=None)
@given(shape=shapes, vocab=vocabs, rows=st.integers(1, 5), number=numbers)
def test_each_group_alone(name: str, shape: str, vocab: int, rows: int, number: int) -> None:
    check(random_logits(shape, rows, vocab, number), random_group(name, rows, vocab, number + 1))


@settings(max_examples=150, deadline=None)
@given(
    names=st.sets(st.sampled_from(group_names)),
    shape=shapes,
    vocab=vocabs,
    rows=st.integers(1, 5),
    number=numbers,
)
def test_groups_together(names: set[str], shape: str, vocab: int, rows: int, number: int) -> None:
    groups: dict[str, Tensor] = {}
    for i, name in enumerate(sorted(names)):
        groups |= random_group(name, rows, vocab, number + i)
    check(random_logits(shape, rows, vocab, number), groups)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, vocab=vocabs, rows=st.integers(1, 5), number=numbers)
def test_all_groups_at_once(shape: str, vocab: int, rows: int, number: int) -> None:
    groups: dict[str, Tensor] = {}
    for i, name in enumerate(group_names):
        groups |= random_group(name, rows, vocab, number + i)
    check(random_logits(shape, rows, vocab, number), groups)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, 3e38, -3e38, INF, -INF, NAN]), min_size=1, max_size=80),
    number=numbers,
)
def test_odd_values_are_filtered_alike(name: str, values: list[float], number: int) -> None:
    check(torch.tensor([values] * 4), random_group(name, 4, len(values), number))


@settings(max_examples=60, deadline=None)
@given(shape=shapes, vocab=vocabs, k=st.integers(1, 5100), number=numbers)
def test_top_k_of_every_size(shape: str, vocab: int, k: int, number: int) -> None:
    """Top-k equals the reference exactly, values too, as nothing is rounded."""
    given_ = arguments(random_logits(shape, 2, vocab, number), top_ks=torch.full((2,), k, dtype=torch.int32))
    assert process_logits(**given_).equal(_reference(**given_))


@settings(max_examples=60, deadline=None)
@given(shape=shapes, vocab=vocabs, p=st.floats(2**-23, 1, width=32), number=numbers)
def test_top_p_of_every_size(shape: str, vocab: int, p: float, number: int) -> None:
    check(random_logits(shape, 2, vocab, number), {"top_ps": torch.tensor([p, 1 - p])})


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(["near", "normal", "peak"]), p=st.floats(0.01, 0.999), number=numbers)
def test_top_p_keeps_the_smallest_head_that_holds_p(shape: str, p: float, number: int) -> None:
    """Top-p keeps the tokens of its definition in double precision, for a vocabulary of usual size."""
    logits = random_logits(shape, 1, 32003, number)
    kept = process_logits(**arguments(logits, top_ps=torch.tensor([p])))[0] > -INF
    mass = logits[0].double().softmax(0)
    least = mass[kept].min()
    assert mass[kept].sum() >= p - BOUNDARY
    assert mass[mass > least].sum() <= p + BOUNDARY
    assert mass[~kept].numel() == 0 or mass[~kept].max() < least


@settings(max_examples=50, deadline=None)
@given(names=st.sets(st.sampled_from(group_names)), shape=shapes, rows=st.integers(2, 9), number=numbers)
def test_rows_do_not_know_of_each_other(names: set[str], shape: str, rows: int, number: int) -> None:
    """Rows have the same bits alone, in a batch, in another order, and with one thread or two.

    Two threads share 9 rows of 8003 logits.
    """
    logits = random_logits(shape, rows, 8003, number)
    groups: dict[str, Tensor] = {}
    for name in sorted(names):
        groups |= random_group(name, rows, 8003, number)
    given_ = arguments(logits, **groups)

    def rows_of(select: Any) -> Tensor:
        picked = {name: select(value) if value.numel() else value for name, value in given_.items()}
        return process_logits(**picked).view(torch.int32)

    whole = rows_of(lambda value: value)
    assert torch.cat([rows_of(lambda value, r=r: value[r : r + 1]) for r in range(rows)]).equal(whole)
    assert rows_of(lambda value: value.flip(0)).flip(0).equal(whole)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert rows_of(lambda value: value).equal(whole)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=25, deadline=None)
@given(names=st.sets(st.sampled_from(group_names), min_size=1), number=numbers)
def test_no_argument_is_changed(names: set[str], number: int) -> None:
    groups: dict[str, Tensor] = {}
    for name in sorted(names):
        groups |= random_group(name, 3, 203, number)
    given_ = arguments(random_logits("normal", 3, 203, number), **groups)
    kept = {name: value.clone() for name, value in given_.items()}
    process_logits(**given_)
    assert all(value.equal(kept[name]) for name, value in given_.items())


@settings(max_examples=25, deadline=None)
@given(number=numbers, vocab=st.integers(1, 70))
def test_strided_arguments_are_read_as_they_are(number: int, vocab: int) -> None:
    assume(vocab % 2)
    groups = {name: value[::2] for g in group_names for name, value in random_group(g, 6, vocab, number).items()}
    check(random_logits("normal", 6, 2 * vocab, number)[::2, ::2], groups)


def test_history_may_be_empty() -> None:
    logits = random_logits("normal", 2, 50, 0)
    groups = {
        "history": torch.empty(2, 0, dtype=torch.int32),
        "prompt_lens": torch.zeros(2, dtype=torch.int32),
        "penalties": torch.tensor([[2.0, 1.0, 1.0]] * 2),
    }
    assert process_logits(**arguments(logits, **groups)).equal(logits)


def test_no_rows_give_no_rows() -> None:
    assert process_logits(**arguments(torch.empty(0, 5))).shape == (0, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(2, 5, dtype=torch.float64)),
        ("logits", torch.zeros(5)),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("history", torch.zeros(2, 4, dtype=torch.int64)),
        ("prompt_lens", torch.zeros(3, dtype=torch.int32)),
        ("penalties", torch.ones(2, 2)),
        ("bias_ids", torch.zeros(3, 2, dtype=torch.int32)),
        ("bias_values", torch.zeros(2, 3)),
        ("bias_values", NO_FLOAT),
        ("ban_ids", torch.zeros(2, 2, dtype=torch.int64)),
        ("ban_until", torch.zeros(2, 2, dtype=torch.int32)),
        ("ban_until", NO_INT.long()),
        ("allow_mask", torch.zeros(2, 2, dtype=torch.int32)),
        ("temperatures", torch.ones(3)),
        ("top_ks", torch.ones(2, dtype=torch.int64)),
        ("top_ps", torch.ones(2, dtype=torch.float64)),
        ("min_ps", torch.ones(1)),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Tensor) -> None:
    groups: dict[str, Tensor] = {}
    for group in group_names:
        groups |= random_group(group, 2, 5, 0)
    given_ = arguments(torch.zeros(2, 5), **groups)
    process_logits(**given_)
    with pytest.raises(RuntimeError, match=f"process_logits: {name} is"):
        process_logits(**{**given_, name: value})


@pytest.mark.parametrize("name", ["history", "bias_ids", "ban_ids"])
def test_an_id_past_the_vocabulary_is_named(name: str) -> None:
    groups: dict[str, Tensor] = {}
    for group in ("penalties", "bias", "bans"):
        groups |= random_group(group, 2, 5, 0)
    groups["ban_until"] = torch.full_like(groups["ban_until"], NEVER)
    groups[name][1, 2] = 5
    with pytest.raises(RuntimeError, match=f"process_logits: {name} holds id 5 of a vocabulary of 5"):
        process_logits(**arguments(torch.zeros(2, 5), **groups))


def test_a_ban_that_is_over_may_be_past_the_vocabulary() -> None:
    groups = {"ban_ids": torch.tensor([[9]], dtype=torch.int32), "ban_until": torch.tensor([[5]])}
    assert process_logits(**arguments(torch.zeros(1, 5), **groups)).equal(torch.zeros(1, 5))
