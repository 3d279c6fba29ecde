"""process_logits: each step against transformers' processors, their order, and that no row knows of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trtspec.ops import process_logits
from trtspec.sampling_params import NEVER

INF = float("inf")
NO_INT = torch.empty(0, dtype=torch.int32)
NO_FLOAT = torch.empty(0)

# Parameters are fractions that fp32 holds exactly, so that both sides compare with the same number.
temperatures = st.integers(1, 256).map(lambda n: n / 64)
top_ks = st.integers(1, 60)
top_ps = st.integers(1, 63).map(lambda n: n / 64)
min_ps = st.integers(1, 64).map(lambda n: n / 64)
seeds = st.integers(0, 2**31)


def process(logits: Tensor, **groups: Tensor) -> Tensor:
    """process_logits with every group not named left zero-size."""
    unused = {
        "positions": torch.zeros(len(logits), dtype=torch.int64),
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
    assert not set(groups) - set(unused)
    return process_logits(logits, **{**unused, **groups})


def each(value: float, rows: int) -> Tensor:
    return torch.full((rows,), value)


def random_logits(seed: int, rows: int = 3, vocab: int = 50, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def tied_logits(seed: int, rows: int = 3, vocab: int = 50) -> Tensor:
    """At most nine different values a row."""
    return torch.randint(-4, 5, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()


def theirs(logits: Tensor, *processors: LogitsProcessor, input_ids: Tensor | None = None) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64) if input_ids is None else input_ids
    return LogitsProcessorList(processors)(ids, logits.clone())


def with_ties(before: Tensor, after: Tensor) -> Tensor:
    """What transformers' arbitrary choice among equals would keep if it kept all of them: our documented difference."""
    smallest_kept = after.masked_fill(after == -INF, INF).amin(1, keepdim=True)
    return before.masked_fill(before < smallest_kept, -INF)


# --- one step at a time -----------------------------------------------------------------------------------------------


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
    assert torch.equal(ours, with_ties(logits, reference))  # at p = 1, transformers' top ties all stay as well


def test_min_p_zero_is_off() -> None:
    logits = torch.tensor([[0.0, -200.0, -INF]])
    assert torch.equal(process(logits, min_ps=each(0.0, 1)), logits)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, penalty=temperatures, history=st.lists(st.integers(0, 49), min_size=1, max_size=30))
def test_repetition_penalty(seed: int, penalty: float, history: list[int]) -> None:
    """Over prompt and output alike, once per id however often it occurred."""
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
    """OpenAI's mu[j] -= c[j] * frequency + (c[j] > 0) * presence, with c counting the output alone."""
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
    assert banned == [[1, 3], [3], [3]]  # and the padding bans nothing, not even the last id


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
    """Vocabularies that do not fill the last word, and the sign bit, included."""
    vocab = len(allowed)
    words = [sum(bit << i for i, bit in enumerate(allowed[start : start + 32])) for start in range(0, vocab, 32)]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    logits = random_logits(0, rows=1, vocab=vocab)
    out = process(logits, allow_mask=torch.tensor([signed], dtype=torch.int32))
    assert torch.equal(out, logits.masked_fill(~torch.tensor([allowed]), -INF))


# --- all of them ------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    temperature=temperatures,
    k=top_ks,
    p=top_ps,
    min_p=st.integers(1, 16).map(lambda n: n / 64),
    penalty=st.integers(32, 128).map(lambda n: n / 64),
    bias=st.integers(-256, 256).map(lambda n: n / 64),
    history=st.lists(st.integers(3, 49), min_size=4, max_size=20),
)
def test_order_of_operations_is_that_of_transformers(
    seed: int, temperature: float, k: int, p: float, min_p: float, penalty: float, bias: float, history: list[int]
) -> None:
    """Bias, penalty, bans, temperature, top-k, top-p, min-p: swapping any two changes some of these rows."""
    logits = random_logits(seed, rows=1)
    stops, prompt_len, min_tokens = [0, 1], 2, len(history)
    biased = [2, history[0]]
    processors = (
        SequenceBiasLogitsProcessor({(token,): bias for token in biased}),
        RepetitionPenaltyLogitsProcessor(penalty),
        MinNewTokensLengthLogitsProcessor(prompt_len, min_tokens, stops),
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(k),
        TopPLogitsWarper(p),
        MinPLogitsWarper(min_p),
    )
    ours = process(
        logits,
        positions=torch.tensor([len(history)]),
        history=torch.tensor([history], dtype=torch.int32),
        prompt_lens=torch.tensor([prompt_len], dtype=torch.int32),
        penalties=torch.tensor([[penalty, 0.0, 0.0]]),
        bias_ids=torch.tensor([biased], dtype=torch.int32),
        bias_values=torch.full((1, 2), bias),
        ban_ids=torch.tensor([stops], dtype=torch.int32),
        ban_until=torch.full((1, 2), prompt_len + min_tokens),
        temperatures=each(temperature, 1),
        top_ks=torch.tensor([k], dtype=torch.int32),
        top_ps=each(p, 1),
        min_ps=each(min_p, 1),
    )
    assert torch.equal(ours, theirs(logits, *processors, input_ids=torch.tensor([history])))


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        # a bias lifts id 0 over the k-th: it comes before top-k
        ({"bias_ids": [[0]], "bias_values": [[10.0]], "top_ks": [1]}, [0]),
        # a banned favourite does not take a place in the top two, nor mass from top-p, nor set min-p's bar
        ({"ban_ids": [[4]], "ban_until": [[NEVER]], "top_ks": [2]}, [2, 3]),
        ({"allow_mask": [[0b01111]], "top_ps": [0.5]}, [3]),
        ({"allow_mask": [[0b01111]], "min_ps": [0.3]}, [2, 3]),
        # a high temperature flattens before top-p and min-p look
        ({"temperatures": [100.0], "top_ps": [0.9]}, [0, 1, 2, 3, 4]),
        ({"temperatures": [100.0], "min_ps": [0.9]}, [0, 1, 2, 3, 4]),
        # top-p sees only what top-k left: of 4 and 3 with mass 0.73 and 0.27, 4 alone is enough
        ({"top_ks": [2], "top_ps": [0.7]}, [4]),
    ],
)
def test_each_step_sees_what_came_before(groups: dict[str, list[int] | list[float]], kept: list[int]) -> None:
    integers = {"bias_ids", "ban_ids", "allow_mask", "top_ks"}
    tensors = {
        name: torch.tensor(value, dtype=torch.int32 if name in integers else None) for name, value in groups.items()
    }
    out = process(torch.arange(5.0)[None], **tensors)
    assert (out[0] > -INF).nonzero().flatten().tolist() == kept


# --- rows and their neighbours ----------------------------------------------------------------------------------------


def rows_of_all_kinds(rows: int, vocab: int) -> dict[str, Tensor]:
    """Every group in use, by some rows and not by others."""
    g = torch.Generator().manual_seed(3)
    on = torch.arange(rows)

    def some(values: Tensor, off: float, step: int) -> Tensor:
        return torch.where(on % step == 0, values, torch.tensor(off).to(values.dtype))

    uses_penalties = (on % 2 == 0)[:, None]
    return {
        "positions": on + 10,
        "history": torch.randint(-1, vocab, (rows, 12), generator=g, dtype=torch.int32),
        "prompt_lens": torch.randint(0, 12, (rows,), generator=g, dtype=torch.int32),
        "penalties": torch.where(uses_penalties, torch.rand(rows, 3, generator=g) + 0.5, torch.tensor([1.0, 0.0, 0.0])),
        "bias_ids": torch.randint(-1, vocab, (rows, 3), generator=g, dtype=torch.int32),
        "bias_values": torch.randn(rows, 3, generator=g),
        "ban_ids": torch.randint(-1, vocab, (rows, 2), generator=g, dtype=torch.int32),
        "ban_until": torch.randint(0, 2 * rows, (rows, 2), generator=g),
        "allow_mask": torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=g).to(torch.int32),
        "temperatures": some(torch.rand(rows, generator=g) + 0.5, 0.0, 3),
        "top_ks": some(torch.randint(1, vocab, (rows,), generator=g, dtype=torch.int32), 0, 2),
        "top_ps": some(torch.rand(rows, generator=g), 1.0, 3),
        "min_ps": some(torch.rand(rows, generator=g) * 0.2, 0.0, 5),
    }


@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.integers(0, 29), min_size=1, max_size=12), vocab=st.integers(2, 130))
def test_a_row_has_the_same_bits_in_every_batch(chosen: list[int], vocab: int) -> None:
    groups = rows_of_all_kinds(30, vocab)
    logits = random_logits(vocab, rows=30, vocab=vocab)
    whole = process(logits, **groups)
    picked = torch.tensor(chosen)
    part = process(logits[picked], **{name: value[picked] for name, value in groups.items()})
    assert torch.equal(part, whole[picked])


OFF: dict[str, Sequence[object]] = {
    "penalties": ([[1.0, 0.0, 0.0]], [[2.0, 0.5, 0.5]]),
    "temperatures": ([1.0], [0.3]),
    "top_ks": ([0], [2]),
    "top_ps": ([1.0], [0.2]),
    "min_ps": ([0.0], [0.9]),
}


@pytest.mark.parametrize("name", OFF)
def test_a_row_that_does_not_ask_is_as_if_nobody_did(name: str) -> None:
    """Its neighbour uses the group, it has the group's off value: bit-identical to the group being zero-size."""
    logits = random_logits(5, rows=2, vocab=77)
    kind = torch.int32 if name == "top_ks" else torch.float32
    off, on = (torch.tensor(value, dtype=kind) for value in OFF[name])
    history = {}
    if name == "penalties":
        history = {"history": torch.tensor([[1, 2, 3]] * 2, dtype=torch.int32), "prompt_lens": torch.ones(2).int()}
    out = process(logits, **{name: torch.cat((off, on))}, **history)
    assert torch.equal(out[0], logits[0])
    assert not torch.equal(out[1], logits[1])


def test_a_row_of_nan_stays_so_and_harms_nobody() -> None:
    groups = rows_of_all_kinds(4, 40)
    logits = random_logits(0, rows=4, vocab=40)
    broken = logits.clone()
    broken[2] = float("nan")
    groups["allow_mask"] = torch.full((4, 2), -1, dtype=torch.int32)
    out, clean = process(broken, **groups), process(logits, **groups)
    assert out[2].isnan().any()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("used", [False, True], ids=["unused_groups", "all_groups"])
def test_opcheck(used: bool) -> None:
    groups = {name: value.new_empty(0) for name, value in rows_of_all_kinds(4, 40).items()}
    groups = rows_of_all_kinds(4, 40) if used else {**groups, "positions": torch.arange(4)}
    args = (random_logits(0, rows=4, vocab=40), *groups.values())
    torch.library.opcheck(torch.ops.trtspec.process_logits.default, args, test_utils=("test_schema", "test_faketensor"))
