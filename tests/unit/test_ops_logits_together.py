"""process_logits with all its steps: their order is that of transformers, and rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.logits_cases import INF, each, process, random_logits, seeds, temperatures, theirs, top_ks, top_ps
from trtspec.sampling_params import NEVER

# --- all steps --------------------------------------------------------------------------------------------------------


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
    """The order is bias, penalty, bans, temperature, top-k, top-p, min-p.

    Swapping any two changes some of these rows.
    """
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
        # bias comes before top-k: it lifts id 0 over the k-th
        ({"bias_ids": [[0]], "bias_values": [[10.0]], "top_ks": [1]}, [0]),
        # a banned favourite takes no place in the top two and no mass from top-p, and does not set the bar of min-p
        ({"ban_ids": [[4]], "ban_until": [[NEVER]], "top_ks": [2]}, [2, 3]),
        ({"allow_mask": [[0b01111]], "top_ps": [0.5]}, [3]),
        ({"allow_mask": [[0b01111]], "min_ps": [0.3]}, [2, 3]),
        # a high temperature flattens the distribution before top-p and min-p
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
    """Tensors of every group, in use by some rows and not by others."""
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
    """A row with a group's off value has the bits of a zero-size group, though its neighbour uses the group."""
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
