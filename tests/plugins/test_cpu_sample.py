"""spec_sample in C++ draws exactly the reference's tokens, on any instruction set that TRTSPEC_CPU_ISA names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import gumbel_noise, load_plugins, spec_accept, spec_sample
from trtspec.ops.sample import _log, _reference

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

INF = float("inf")
NO_IDS = torch.empty(0, dtype=torch.int64)
NAN_TOKEN = 2**63 - 1

seeds64 = st.integers(-(2**63), 2**63 - 1)
positions64 = st.one_of(st.integers(0, 2**20), st.integers(2**32 - 4, 2**32 + 4), st.integers(0, 2**63 - 1))
vocabs = st.one_of(st.integers(1, 100), st.sampled_from([127, 128, 129, 1000, 4096, 5003]))
# The spread of logits decides which columns never get noise: none of flat ones, nearly all of peaked ones.
shapes = st.sampled_from(["flat", "tied", "normal", "steep", "peak", "masked", "huge"])
numbers = st.integers(0, 2**31)


def random_logits(shape: str, rows: int, vocab: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    normal = torch.randn(rows, vocab, generator=generator)
    peaks = torch.randint(vocab, (rows, 1), generator=generator)
    kept = torch.rand(rows, vocab, generator=generator) < 0.05
    return {
        "flat": torch.full((rows, vocab), 1.5),
        "tied": normal.round(),
        "normal": 3 * normal,
        "steep": 40 * normal,
        "peak": normal.scatter(1, peaks, 20.0),
        "masked": normal.masked_fill(~kept, -INF),  # also whole rows
        "huge": 1e7 * normal,  # noise and its bounds round to whole units
    }[shape]


def own_ids(vocab: int, number: int, sort: bool) -> Tensor:
    """Return distinct ids of a vocabulary three times as large."""
    ids = torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(number))[:vocab]
    return ids.sort().values if sort else ids


def check(logits: Tensor, greedy: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor) -> None:
    drawn = spec_sample(logits, greedy, seeds, positions, ids)
    assert drawn.tolist() == _reference(logits, greedy, seeds, positions, ids).tolist()


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    vocab=vocabs,
    rows=st.lists(st.tuples(st.booleans(), seeds64, positions64), min_size=1, max_size=5),
    ids=st.sampled_from(["dense", "sorted", "shuffled"]),
    number=numbers,
)
@example("flat", 70, [(False, -1, 2**63 - 1), (True, 2**63 - 1, 2**32), (False, -(2**63), 0)], "dense", 0)
def test_draws_are_those_of_the_reference(
    shape: str, vocab: int, rows: list[tuple[bool, int, int]], ids: str, number: int
) -> None:
    greedy, seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    own = NO_IDS if ids == "dense" else own_ids(vocab, number, sort=ids == "sorted")
    check(random_logits(shape, len(rows), vocab, number), greedy, seeds, positions, own)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, INF, -INF, float("nan")]), min_size=1, max_size=80),
    greedy=st.booleans(),
    dense=st.booleans(),
    number=numbers,
)
def test_odd_values_are_drawn_alike(values: list[float], greedy: bool, dense: bool, number: int) -> None:
    ids = NO_IDS if dense else own_ids(len(values), number, sort=False)
    check(torch.tensor([values]), torch.tensor([greedy]), torch.tensor([number]), torch.tensor([3]), ids)


@pytest.mark.parametrize("at", [0, 15, 64, 4095, 4096])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_nan_is_seen_wherever_it_lies(at: int, greedy: bool) -> None:
    """A NaN is found in any column, also among columns so low that they get no noise."""
    logits = random_logits("peak", 2, 4097, 0)
    logits[0, at] = float("nan")
    tokens = spec_sample(logits, torch.tensor([greedy] * 2), torch.arange(2), torch.arange(2), NO_IDS)
    assert tokens[0].item() == NAN_TOKEN
    assert 0 <= tokens[1] < 4097


@settings(max_examples=50, deadline=None)
@given(seed=seeds64, position=positions64, dense=st.booleans(), nudge=st.integers(-1, 1), number=numbers)
def test_noise_has_every_bit_of_the_reference(seed: int, position: int, dense: bool, nudge: int, number: int) -> None:
    """Every bit of the noise is the reference's.

    The logits cancel each column's noise, but one column is off by an ulp, so that another bit gives another draw.
    """
    ids = torch.arange(517) if dense else own_ids(517, number, sort=False)
    one = torch.tensor([False]), torch.tensor([seed]), torch.tensor([position])
    logits = -gumbel_noise(one[1], one[2], ids)
    column = number % 517
    toward = torch.tensor(nudge * INF if nudge else 0.0)
    if nudge:
        logits[0, column] = torch.nextafter(logits[0, column], toward)
    check(logits, *one, NO_IDS if dense else ids)


def test_bounds_of_the_noise_hold_for_every_word() -> None:
    """LEAST_NOISE, MOST_NOISE and gumbel_at_most of sample.h, by which the kernel skips columns, are bounds."""
    word = torch.arange(2**23)
    noise = -_log(-_log((word.float() + 0.5) * 2.0**-23))
    assert noise.min().item() >= -2.8125
    assert noise.max().item() <= 16.636
    y = (2**23 - 1 - word).float() + 0.5
    margin = 103.974 - y.view(torch.int32).float() * 8.2629582e-8 - noise
    assert margin.min().item() > 5e-4
    assert margin[word > 2**22].max().item() < 1  # else the bound would be of no use


@pytest.mark.parametrize("dense", [True, False])
def test_noise_can_win_from_the_edge_of_reach(dense: bool) -> None:
    """A column far below the top is not skipped if its noise can win.

    Id 1's noise is all but the largest that there is.
    """
    seeds = torch.arange(2**18)
    noise = gumbel_noise(seeds, torch.zeros_like(seeds), torch.arange(2))
    row = int(noise[:, 1].argmax())
    lead = noise[row, 1] - noise[row, 0]
    assert lead > 9
    logits = torch.stack((torch.stack((lead - 1e-3, torch.tensor(0.0))), torch.stack((lead + 1e-3, torch.tensor(0.0)))))
    args = torch.tensor([False] * 2), seeds[row].expand(2), torch.tensor([0, 0])
    assert spec_sample(logits, *args, NO_IDS if dense else torch.arange(2)).tolist() == [1, 0]


@settings(max_examples=25, deadline=None)
@given(shape=shapes, dense=st.booleans(), rows=st.integers(2, 9), number=numbers)
def test_rows_do_not_know_of_each_other(shape: str, dense: bool, rows: int, number: int) -> None:
    """Rows draw the same tokens alone, in a batch, in another order, and with one thread or two.

    Two threads share 9 rows of 32003 columns.
    """
    vocab = 32003
    logits, ids = random_logits(shape, rows, vocab, number), NO_IDS if dense else own_ids(vocab, number, sort=True)
    args = logits, torch.arange(rows) % 3 == 0, torch.arange(rows) * 31, torch.arange(rows) + 100

    def draw(order: Tensor) -> Tensor:
        logits, greedy, seeds, positions = (value[order] for value in args)
        return spec_sample(logits, greedy, seeds, positions, ids)

    whole = draw(torch.arange(rows))
    assert torch.cat([draw(torch.tensor([r])) for r in range(rows)]).equal(whole)
    assert draw(torch.arange(rows).flip(0)).flip(0).equal(whole)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert draw(torch.arange(rows)).equal(whole)
    finally:
        torch.set_num_threads(threads)


def test_strided_arguments_are_read_as_they_are() -> None:
    logits, line = random_logits("normal", 6, 202, 0), torch.arange(12)
    check(logits[:, ::2], (line % 4 == 0)[::2], line[::2], line[::2], torch.arange(202)[::2])


def test_no_rows_draw_nothing() -> None:
    assert spec_sample(torch.empty(0, 5), torch.empty(0, dtype=torch.bool), NO_IDS, NO_IDS, NO_IDS).shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(2, 5, dtype=torch.float64)),
        ("logits", torch.zeros(5)),
        ("greedy", torch.zeros(3, dtype=torch.bool)),
        ("seeds", torch.zeros(1, dtype=torch.int64)),
        ("positions", torch.zeros(2, dtype=torch.int32)),
        ("vocab_ids", torch.arange(4)),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Tensor) -> None:
    args = {
        "logits": torch.zeros(2, 5),
        "greedy": torch.zeros(2, dtype=torch.bool),
        "seeds": torch.arange(2),
        "positions": torch.arange(2),
        "vocab_ids": NO_IDS,
    }
    with pytest.raises(RuntimeError, match=f"spec_sample: {name} is"):
        spec_sample(**{**args, name: value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("draft_lens", torch.empty(0, dtype=torch.int32)),
        ("forced_accept", torch.zeros(3, dtype=torch.int32)),
        ("emits", torch.ones(1, dtype=torch.bool)),
        ("draft_tokens", torch.zeros(2, 3, dtype=torch.int64)),
        ("sampled", torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_what_does_not_fit_is_not_accepted(name: str, tensor: Tensor) -> None:
    arguments = {
        "sampled": torch.zeros(2, 3, dtype=torch.int64),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.int64),
        "draft_lens": torch.zeros(2, dtype=torch.int32),
        "forced_accept": torch.zeros(2, dtype=torch.int32),
        "emits": torch.ones(2, dtype=torch.bool),
    }
    with pytest.raises(RuntimeError, match=name if name != "sampled" else "sampled is"):
        spec_accept(**{**arguments, name: tensor})
