"""spec_sample: the noise is exactly that of the contract, and the draw is the arg-max of logits and noise."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from trtspec.ops import gumbel_noise, spec_sample
from trtspec.ops.sample import _log, philox

NO_IDS = torch.empty(0, dtype=torch.int64)
NO_SEEDS = torch.empty(0, dtype=torch.int64)
NAN_TOKEN = 2**63 - 1
FALSE_ALARM = 1e-4  # of each statistical test, if seeds did not fix its draws

seeds64 = st.integers(-(2**63), 2**63 - 1)
# int64 tensors; a sequence never gets past 2^31 tokens, but the counter has room for more
token_indices = st.integers(0, 2**40)


def noise_of(seed: int, t: int, ids: list[int]) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([t]), torch.tensor(ids))[0]


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


# --- the docstring's layout once more, in Python integers and numpy ---------------------------------------------------


def python_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c, (k0, k1), mask = counter, key, 2**32 - 1
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = ((b >> 32) ^ c[1] ^ k0, b & mask, (a >> 32) ^ c[3] ^ k1, a & mask)
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def numpy_uniform(seed: int, t: int, v: int) -> np.float32:
    low, high = seed % 2**32, (seed >> 32) % 2**32
    x = python_philox((v >> 2, t % 2**32, t >> 32, 0), (low, high))[v & 3]
    return (np.float32(x >> 9) + np.float32(0.5)) * np.float32(2.0**-23)


def numpy_log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cephes' logf, one fp32 operation at a time."""
    coefficients = [
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ]  # fmt: skip
    single = np.float32
    mantissa, exponent = np.frexp(x)
    below = mantissa < single(np.sqrt(0.5))
    exponent = (exponent - below).astype(single)
    f = np.where(below, mantissa + mantissa, mantissa) - single(1)
    z = f * f
    y = np.full_like(f, single(coefficients[0]))
    for coefficient in coefficients[1:]:
        y = y * f + single(coefficient)
    y = y * f * z
    y = y + exponent * single(-2.12194440e-4)
    y = y - single(0.5) * z
    return (f + y) + exponent * single(0.693359375)


# --- Philox and the noise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0x00000000, 0x00000000, 0x00000000, 0x00000000),
            (0x00000000, 0x00000000),
            [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: list[int]) -> None:
    """Philox returns the vectors of Random123's kat_vectors for philox4x32 with 10 rounds."""
    seed = key[1] << 32 | key[0]
    signed = seed - 2**64 if seed >= 2**63 else seed
    c0, c1, c2 = (torch.tensor(word) for word in counter[:3])
    assert philox(torch.tensor(signed), c0, c1, c2, use=counter[3]).tolist() == words


@settings(max_examples=100, deadline=None)
@given(seed=seeds64, t=token_indices, ids=st.lists(st.integers(0, 300_000), min_size=1, max_size=8))
def test_noise_follows_the_written_layout(seed: int, t: int, ids: list[int]) -> None:
    uniform = np.array([numpy_uniform(seed, t, v) for v in ids])
    expected = -numpy_log(-numpy_log(uniform))
    np.testing.assert_array_equal(noise_of(seed, t, ids).numpy(), expected)


def test_noise_of_every_possible_word_is_finite() -> None:
    """u has 2^23 values. None of them is 0 or 1, so neither of the two logs is infinite."""
    u = (torch.arange(2**23).float() + 0.5) * 2.0**-23
    assert u.min().item() == 2.0**-24
    assert u.max().item() == 1 - 2.0**-24
    assert torch.isfinite(-_log(-_log(u))).all()


def ulps_off(x: Tensor) -> float:
    exact = np.log(x.numpy().astype(np.float64))
    error = np.abs(_log(x).numpy().astype(np.float64) - exact)
    return float((error / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_log_is_within_an_ulp_of_every_uniform() -> None:
    assert ulps_off((torch.arange(2**23).float() + 0.5) * 2.0**-23) <= 1.0


def test_log_is_within_an_ulp_of_all_normal_numbers() -> None:
    """The logarithm is tested at every exponent, with 2^13 mantissas each."""
    patterns = torch.arange(0x00800000, 0x7F800000, 1024, dtype=torch.int32)
    x = patterns.view(torch.float32)
    assert ulps_off(x[x != 1]) <= 1.0
    assert _log(torch.ones(1)).item() == 0.0


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_noise_is_gumbel_along_each_axis(axis: str) -> None:
    """The noise passes a Kolmogorov-Smirnov test of 2^18 draws along each of the counter's coordinates alone."""
    n, one = 2**18, torch.tensor([7])
    line = torch.arange(n)
    noise = {
        "seeds": lambda: gumbel_noise(line, one.expand(n), one),
        "positions": lambda: gumbel_noise(one.expand(n), line, one),
        "ids": lambda: gumbel_noise(one, one, line),
    }[axis]()
    assert scipy.stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > FALSE_ALARM


def test_noise_has_the_moments_of_gumbel() -> None:
    """The mean is Euler's gamma and the variance pi^2 / 6, within 4 standard errors (false alarm about 6e-5 each)."""
    n = 2**20
    noise = gumbel_noise(torch.arange(1024), torch.arange(1024), torch.arange(1024)).double().flatten()
    variance = np.pi**2 / 6
    assert abs(noise.mean().item() - np.euler_gamma) < 4 * np.sqrt(variance / n)
    # Var(s^2) = (mu4 - sigma^4) / n, with mu4 = (3 + 12/5) sigma^4
    assert abs(noise.var().item() - variance) < 4 * np.sqrt(4.4 * variance**2 / n)


def test_neighbouring_tokens_and_ids_share_no_noise() -> None:
    """Noise does not repeat. It would if a lane, a word or a bit of the counter were dropped."""
    positions = torch.tensor([0, 1, 2, 2**32, 2**32 + 1])
    seeds = torch.tensor([0, 1, -1, 2**32, 2**62])
    noise = torch.cat([gumbel_noise(seeds, t.expand(5), torch.arange(64)) for t in positions])  # [25, 64]
    repeats = noise.numel() - noise.unique().numel()
    assert repeats <= 3  # 1600 draws of 2^23 values: 0.15 chance repeats expected


def test_draws_follow_the_softmax() -> None:
    """100k draws of one distribution with varied seeds pass a chi-square test."""
    n, probabilities = 100_000, torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03])
    logits = probabilities.log().expand(n, 5)
    greedy = torch.zeros(n, dtype=torch.bool)
    tokens = spec_sample(logits, greedy, torch.arange(n), torch.full((n,), 17), NO_IDS)
    counts = torch.bincount(tokens, minlength=5).numpy()
    expected = probabilities.double().numpy() * n
    assert scipy.stats.chisquare(counts, expected * (counts.sum() / expected.sum())).pvalue > FALSE_ALARM


# --- the draw ---------------------------------------------------------------------------------------------------------


def test_draw_is_the_argmax_of_logits_and_noise() -> None:
    logits = random_logits(64, 203)  # not a multiple of the four ids of a counter
    seeds, positions = torch.arange(64) * 7919, torch.arange(64) + 5
    noisy = logits + gumbel_noise(seeds, positions, torch.arange(203))
    tokens = spec_sample(logits, torch.zeros(64, dtype=torch.bool), seeds, positions, NO_IDS)
    assert torch.equal(tokens, noisy.argmax(1))


def test_greedy_rows_are_untouched_by_noise() -> None:
    """Greedy rows next to sampled rows draw their arg-max.

    Noise would change nearly every one of these flat distributions.
    """
    logits = random_logits(64, 50) * 0.01
    greedy = torch.arange(64) % 2 == 0
    tokens = spec_sample(logits, greedy, torch.arange(64), torch.arange(64), NO_IDS)
    assert torch.equal(tokens[greedy], logits[greedy].argmax(1))
    assert (tokens[~greedy] != logits[~greedy].argmax(1)).sum() > 24


def test_all_greedy_needs_no_seeds() -> None:
    logits = random_logits(8, 50)
    tokens = spec_sample(logits, torch.ones(8, dtype=torch.bool), NO_SEEDS, torch.arange(8), NO_IDS)
    assert torch.equal(tokens, logits.argmax(1))


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    greedy, positions = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    assert spec_sample(logits, greedy, NO_SEEDS, positions, NO_IDS).tolist() == [1, 0]


def test_ties_go_to_the_lowest_target_id() -> None:
    """Ties do not go to the lowest column: column 4 is the target's id 2."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    ids = torch.tensor([1, 9, 5, 0, 2])
    assert spec_sample(logits, torch.tensor([True]), NO_SEEDS, torch.tensor([0]), ids).tolist() == [2]


@pytest.mark.parametrize("greedy", [True, False])
def test_permuting_the_columns_permutes_nothing_in_the_result(greedy: bool) -> None:
    logits = random_logits(32, 101).round(decimals=1)  # rounded, so that there are ties
    flags, seeds, positions = torch.full((32,), greedy), torch.arange(32), torch.arange(32)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    plain = spec_sample(logits, flags, seeds, positions, NO_IDS)
    assert torch.equal(spec_sample(logits[:, order], flags, seeds, positions, order), plain)


def test_a_smaller_vocabulary_uses_the_noise_of_its_target_ids() -> None:
    """Columns i stand for target ids i + d2t[i]. The draw is the target's own if all its other logits were -inf."""
    d2t = torch.tensor([3, 3, 10, 40, 41])
    ids = torch.arange(5) + d2t
    small = random_logits(200, 5)
    full = torch.full((200, 64), float("-inf"))
    full[:, ids] = small
    flags, seeds, positions = torch.zeros(200, dtype=torch.bool), torch.arange(200), torch.full((200,), 9)
    drawn = spec_sample(small, flags, seeds, positions, ids)
    assert torch.equal(drawn, spec_sample(full, flags, seeds, positions, NO_IDS))
    assert set(drawn.tolist()) == set(ids.tolist())


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((1000, 40), float("-inf"))
    logits[:, 33] = -1e30  # far below any noise, yet the only one allowed
    tokens = spec_sample(logits, torch.zeros(1000, dtype=torch.bool), torch.arange(1000), torch.arange(1000), NO_IDS)
    assert tokens.unique().tolist() == [33]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("ids", [NO_IDS, torch.arange(50).flip(0)], ids=["same_ids", "own_ids"])
def test_a_row_with_nan_draws_the_refused_id(greedy: bool, ids: Tensor) -> None:
    """One NaN is enough to draw the refused id. It does not harm the next row."""
    logits = random_logits(2, 50)
    logits[0, 31] = float("nan")
    flags, seeds, positions = torch.full((2,), greedy), torch.tensor([1, 2]), torch.tensor([3, 4])
    tokens = spec_sample(logits, flags, seeds, positions, ids)
    assert tokens[0].item() == NAN_TOKEN
    assert tokens[1:].equal(spec_sample(logits[1:], flags[1:], seeds[1:], positions[1:], ids))
    assert 0 <= tokens[1] < 50


@settings(max_examples=50, deadline=None)
@given(
    chosen=st.lists(st.integers(0, 39), min_size=1, max_size=20),
    vocab=st.integers(1, 70),
    own_ids=st.booleans(),
)
def test_a_row_is_drawn_alike_in_every_batch(chosen: list[int], vocab: int, own_ids: bool) -> None:
    logits = random_logits(40, vocab, seed=vocab)
    flags, seeds, positions = torch.arange(40) % 3 == 0, torch.arange(40) * 31, torch.arange(40) + 100
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(2)) if own_ids else NO_IDS
    whole = spec_sample(logits, flags, seeds, positions, ids)
    picked = torch.tensor(chosen)
    part = spec_sample(logits[picked], flags[picked], seeds[picked], positions[picked], ids)
    assert torch.equal(part, whole[picked])


@settings(max_examples=25, deadline=None)
@given(seed=seeds64, t=token_indices, vocab=st.integers(1, 70))
@example(seed=-1, t=2**32 + 5, vocab=70)
def test_noise_has_the_same_bits_with_and_without_ids(seed: int, t: int, vocab: int) -> None:
    """Logits that are minus each id's own noise leave a tie, which id 0 wins. With any other bit it would not."""
    rows = torch.zeros(1, dtype=torch.bool), torch.tensor([seed]), torch.tensor([t])
    noise = noise_of(seed, t, list(range(vocab)))
    assert spec_sample(-noise[None], *rows, NO_IDS).item() == 0


@pytest.mark.parametrize("own_ids", [True, False])
def test_opcheck(own_ids: bool) -> None:
    args = (
        random_logits(3, 10),
        torch.tensor([True, False, False]),
        torch.arange(3),
        torch.arange(3),
        torch.arange(10) if own_ids else NO_IDS,
    )
    torch.library.opcheck(torch.ops.trtspec.spec_sample.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_with_every_token_removed_draws_the_refused_id(greedy: bool) -> None:
    """The draw is not the lowest id, as that token was banned, too."""
    logits = random_logits(1, 50).fill_(float("-inf"))
    none = torch.empty(0, dtype=torch.int64)
    tokens = spec_sample(logits, torch.tensor([greedy]), torch.tensor([1]), torch.tensor([3]), none)
    assert tokens.item() == NAN_TOKEN
