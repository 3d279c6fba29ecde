"""Each step of process_logits alone, against transformers' processors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.logits_cases import (
    INF,
    each,
    min_ps,
    process,
    random_logits,
    seeds,
    temperatures,
    theirs,
    tied_logits,
    top_ks,
    top_ps,
)
from trtspec.sampling_params import NEVER


def with_ties(before: Tensor, after: Tensor) -> Tensor:
    """Logits that transformers would keep if it kept all ties, not an arbitrary one: our documented difference."""
    smallest_kept = after.masked_fill(after == -INF, INF).amin(1, keepdim=True)
    return before.masked_fill(before < smallest_kept, -INF)


def test_nothing_asked_is_nothing_done() -> None:
    logits = random_logits(0)
    assert torch.equal(process(logits), logits)


def test_input_is_left_alone() -> None:
    logits = random_logits(0)
    kept = logits.clone()
    process(logits, temperatures=each(0.5, 3), top_ks=torch.full((3,), 2, dtype=torch.int32), min_ps=each(0.5, 3))
    assert torch.equal(logits, kept)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, temperature=temperatures)
def test_temperature(seed: int, temperature: float) -> None:
    logits = random_logits(seed)
    assert torch.equal(
        process(logits, temperatures=each(temperature, 3)), theirs(logits, TemperatureLogitsWarper(temperature))
    )


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_rows_are_undivided(temperature: float) -> None:
    logits = random_logits(0, rows=2)
    out = process(logits, temperatures=torch.tensor([temperature, 0.5]))
    assert torch.equal(out[0], logits[0])
    assert torch.equal(out[1], logits[1] / 0.5)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, k=top_ks)
def test_top_k(seed: int, k: int) -> None:
    logits = random_logits(seed)
    ours = process(logits, top_ks=torch.full((3,), k, dtype=torch.int32))
    assert torch.equal(ours, theirs(logits, TopKLogitsWarper(k)))


@settings(max_examples=50, deadline=None)
@given(seed=seeds, k=top_ks)
def test_top_k_keeps_all_ties_with_the_kth(seed: int, k: int) -> None:
    logits = tied_logits(seed)
    ours = process(logits, top_ks=torch.full((3,), k, dtype=torch.int32))
    assert torch.equal(ours, theirs(logits, TopKLogitsWarper(k)))  # transformers keeps them too


@pytest.mark.parametrize("k", [0, -1, 50, 51, 2**31 - 1])
def test_top_k_off(k: int) -> None:
    logits = random_logits(0, vocab=50)
    assert torch.equal(process(logits, top_ks=torch.full((3,), k, dtype=torch.int32)), logits)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, p=top_ps, spread=st.sampled_from([0.01, 1.0, 5.0, 40.0]))
def test_top_p(seed: int, p: float, spread: float) -> None:
    logits = random_logits(seed, spread=spread)
    assert torch.equal(process(logits, top_ps=each(p, 3)), theirs(logits, TopPLogitsWarper(p)))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, p=top_ps)
def test_top_p_keeps_all_ties_with_the_last(seed: int, p: float) -> None:
    logits = tied_logits(seed)
    assert torch.equal(process(logits, top_ps=each(p, 3)), with_ties(logits, theirs(logits, TopPLogitsWarper(p))))


def test_top_p_keeps_at_least_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, 30.0], [0.0, 0.0, 0.0]])
    out = process(logits, top_ps=each(1e-6, 2))
    assert (out > -INF).tolist() == [[False, False, True], [True, True, True]]  # all three tie


def test_top_p_one_is_off_even_for_what_rounds_to_no_mass() -> None:
    logits = torch.tensor([[0.0, -200.0, -INF]])
    assert torch.equal(process(logits, top_ps=each(1.0, 1)), logits)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, p=min_ps, tied=st.booleans())
def test_min_p(seed: int, p: float, tied: bool) -> None:
    logits = tied_logits(seed) if tied else random_logits(seed)
    ours, reference = process(logits, min_ps=each(p, 3)), theirs(logits, MinPLogitsWarper(p))
    assert torch.equal(ours, with_ties(logits, reference))  # at p = 1, transformers keeps all ties for the top, too


def test_min_p_zero_is_off() -> None:
    logits = torch.tensor([[0.0, -200.0, -INF]])
    assert torch.equal(process(logits, min_ps=each(0.0, 1)), logits)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, penalty=temperatures, history=st.lists(st.integers(0, 49), min_size=1, max_size=30))
def test_repetition_penalty(seed: int, penalty: float, history: list[int]) -> None:
    """The penalty is for ids of prompt and output alike, once per id, however often it occurred."""
    logits = random_logits(seed, rows=1)
    ours = process(
        logits,
        history=torch.tensor([history], dtype=torch.int32),
        prompt_lens=torch.tensor([len(history) // 2], dtype=torch.int32),
        penalties=torch.tensor([[penalty, 0.0, 0.0]]),
    )
    reference = theirs(logits, RepetitionPenaltyLogitsProcessor(penalty), input_ids=torch.tensor([history]))
    assert torch.equal(ours, reference)


@settings(max_examples=50, deadline=None)
@given(
    seed=seeds,
    presence=st.integers(-128, 128).map(lambda n: n / 64),
    frequency=st.integers(-128, 128).map(lambda n: n / 64),
    prompt=st.lists(st.integers(0, 49), max_size=20),
    output=st.lists(st.integers(0, 49), max_size=20),
    padding=st.integers(0, 5),
)
def test_presence_and_frequency_penalties(
    seed: int, presence: float, frequency: float, prompt: list[int], output: list[int], padding: int
) -> None:
    """The penalties are OpenAI's mu[j] -= c[j] * frequency + (c[j] > 0) * presence, where c counts the output alone."""
    assume(prompt or output or padding)
    logits = random_logits(seed, rows=1)
    expected = logits.clone()
    for token in range(50):
        count = output.count(token)
        expected[0, token] = (logits[0, token] - count * frequency) - (presence if count else 0.0)
    ours = process(
        logits,
        history=torch.tensor([[*prompt, *output, *[-1] * padding]], dtype=torch.int32),
        prompt_lens=torch.tensor([len(prompt)], dtype=torch.int32),
        penalties=torch.tensor([[1.0, presence, frequency]]),
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    prompt_len=st.integers(1, 20),
    num_output=st.integers(0, 10),
    min_tokens=st.integers(0, 10),
    stops=st.lists(st.integers(0, 49), min_size=1, max_size=4, unique=True),
)
def test_min_tokens_holds_stop_ids_back(prompt_len: int, num_output: int, min_tokens: int, stops: list[int]) -> None:
    logits = random_logits(0, rows=1)
    length = prompt_len + num_output
    ours = process(
        logits,
        positions=torch.tensor([length]),
        ban_ids=torch.tensor([stops], dtype=torch.int32),
        ban_until=torch.full((1, len(stops)), prompt_len + min_tokens),
    )
    reference = theirs(
        logits,
        MinNewTokensLengthLogitsProcessor(prompt_len, min_tokens, stops),
        input_ids=torch.zeros(1, length, dtype=torch.int64),
    )
    assert torch.equal(ours, reference)


def test_each_ban_has_its_own_horizon() -> None:
    logits = torch.zeros(3, 6)
    out = process(
        logits,
        positions=torch.tensor([4, 5, 2**40]),
        ban_ids=torch.tensor([[1, 3, -1]] * 3, dtype=torch.int32),
        ban_until=torch.tensor([[5, NEVER, NEVER]] * 3),
    )
    banned = [row.nonzero().flatten().tolist() for row in out == -INF]
    assert banned == [[1, 3], [3], [3]]  # the padding bans nothing, not even the last id


def test_bias_is_added_per_row() -> None:
    logits = torch.zeros(2, 4)
    out = process(
        logits,
        bias_ids=torch.tensor([[0, 3, -1], [2, -1, -1]], dtype=torch.int32),
        bias_values=torch.tensor([[1.5, -2.0, 99.0], [-INF, INF, float("nan")]]),
    )
    assert out.tolist() == [[1.5, 0.0, 0.0, -2.0], [0.0, 0.0, -INF, 0.0]]


@settings(max_examples=50, deadline=None)
@given(allowed=st.lists(st.booleans(), min_size=1, max_size=100))
def test_allow_mask_is_packed_in_words_of_32(allowed: list[bool]) -> None:
    """The mask is in words of 32 bits.

    These include the sign bit, and a last word that the vocabulary does not fill.
    """
    vocab = len(allowed)
    words = [sum(bit << i for i, bit in enumerate(allowed[start : start + 32])) for start in range(0, vocab, 32)]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    logits = random_logits(0, rows=1, vocab=vocab)
    out = process(logits, allow_mask=torch.tensor([signed], dtype=torch.int32))
    assert torch.equal(out, logits.masked_fill(~torch.tensor([allowed]), -INF))
