"""process_logits and spec_sample for rows that are spread over programs, in Triton's interpreter.

They have the bits of rows with a program each, which test_triton_logits.py compares with the reference. The ops are
also tested as torch calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton import logits as kernels
from trtspec_plugins.triton.accept import spec_accept
from trtspec_plugins.triton.logits import CHUNK, process_logits, process_rows, process_spread
from trtspec_plugins.triton.sample import PART, spec_sample, spec_sample_dense_kernel, spec_sample_kernel

from tests.contract import batches
from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from tests.plugins.references import reference
from tests.plugins.test_triton_logits import awkward, check, complete, everything, ramp, spread

INF = float("inf")
NO_IDS = torch.empty(0, dtype=torch.int64)
NO_GROUPS = {
    "history": torch.empty(0, dtype=torch.int32),
    "prompt_lens": torch.empty(0, dtype=torch.int32),
    "penalties": torch.empty(0),
    "bias_ids": torch.empty(0, dtype=torch.int32),
    "bias_values": torch.empty(0),
}


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether both have the same bits."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def masked(arguments: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add a mask that allows about half of the tokens, and all of them in some rows."""
    rows, vocab = arguments["logits"].shape
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=g)
    words[torch.rand(rows, generator=g) < 0.3] = -1
    return arguments | {"allow_mask": words}


@pytest.mark.parametrize("form", [process_rows, process_spread])
def test_a_mask_of_rows_without_words_is_no_mask(form: Callable[..., Tensor]) -> None:
    """CUDA graphs give masks this shape if no request has one. A kernel that read it would read at address 0."""
    x = spread(0, 3, 50)
    assert torch.equal(form(**complete({"logits": x, "allow_mask": torch.empty(3, 0)})), x)


GROUPS = st.sets(st.sampled_from(["ban_ids", "temperatures", "top_ks", "top_ps", "min_ps"]), max_size=2)


@settings(deadline=None, max_examples=20)
@given(awkward(), GROUPS, st.integers(1, 4), st.integers(0, 99))
def test_rows_have_the_same_bits_however_they_are_split(
    arguments: dict[str, Tensor], without: set[str], parts: int, seed: int
) -> None:
    """Bits are the same for any row, any groups, and chunks of any length."""
    arguments = masked(arguments, seed) if seed % 2 else arguments
    without |= {"ban_until"} if "ban_ids" in without else set()
    arguments = complete({name: value for name, value in arguments.items() if name not in without})
    chunk = -(-arguments["logits"].shape[1] // parts)
    assert same(process_spread(**arguments, chunk=chunk), process_rows(**arguments))


@settings(deadline=None, max_examples=25)
@given(batches.logits(), st.integers(0, 99))
def test_allowed_tokens_are_the_reference_s(arguments: dict[str, Tensor], seed: int) -> None:
    check(masked(arguments, seed))


@pytest.mark.parametrize("vocab", [CHUNK, CHUNK + 1, 2 * CHUNK + 17])
def test_long_rows_are_spread(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op chooses the form by the length of a row."""
    arguments = complete({"logits": ramp(2, vocab), **everything(2), "top_ps": torch.tensor([0.9, 0.2])})
    wanted = check(arguments)
    monkeypatch.delattr(kernels, "process_row_kernel" if vocab > CHUNK else "look_kernel")
    assert same(process_logits(**arguments, **NO_GROUPS), wanted)


def test_a_row_is_its_own_whatever_the_others_are() -> None:
    x = spread(5, 5, 300)
    groups = everything(5) | {"top_ks": torch.tensor([20, 0, 7, 300, 1]), "top_ps": torch.tensor([0.9, 0.5, 1, 0.3, 0])}
    whole = process_spread(**complete({"logits": x, **groups}), chunk=120)
    for row in range(5):
        alone = {name: value[row : row + 1] for name, value in groups.items()}
        assert same(whole[row : row + 1], process_spread(**complete({"logits": x[row : row + 1], **alone}), chunk=120))


def test_rows_without_probabilities_keep_what_top_k_leaves() -> None:
    x = spread(3, 4, 50)
    x[0, 7], x[1], x[2, 9], x[3] = float("nan"), -INF, INF, float("nan")
    arguments = complete({"logits": x, **everything(4)})
    got = process_spread(**arguments, chunk=20)
    assert same(got, process_rows(**arguments))
    assert (got[2] > -INF).sum() == 20


def test_top_p_weighs_what_top_k_left_down_to_the_last_bit() -> None:
    """Top-k's share must not count in top-p's mass, down to the last bit.

    With 24 floats that have none between them, all looks but the last are at the whole row.
    """
    chain = [torch.tensor(1.0)]
    for _ in range(23):
        chain.append(chain[-1].nextafter(torch.tensor(INF)))
    k, p = torch.tensor([4, 10, 24, 24]), torch.tensor([0.45, 0.25, 0.9, 0.0])
    arguments = complete({"logits": torch.stack(chain).repeat(4, 1), "top_ks": k, "top_ps": p})
    got = process_spread(**arguments, chunk=7)
    assert same(got, process_rows(**arguments))
    assert (got > -INF).sum(1).tolist() == [2, 3, 22, 1]  # of k equally likely tokens


def test_rows_that_nothing_filters_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "look_kernel")
    monkeypatch.delattr(kernels, "cut_kernel")
    x = spread(1, 2, 100)
    got = process_spread(**complete({"logits": x, "temperatures": torch.full((2,), 0.5)}), chunk=64)
    assert torch.equal(got, x / 0.5)


@settings(deadline=None, max_examples=25)
@given(batches.logits(), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_penalties_and_bias_come_first(arguments: dict[str, Tensor], seed: int, penalised: bool, biased: bool) -> None:
    """The op takes all 14 arguments in their order; penalties and bias are applied first."""
    arguments = complete(arguments)
    rows, vocab = arguments["logits"].shape
    g = torch.Generator().manual_seed(seed)
    extra = dict(NO_GROUPS)
    if penalised:
        extra |= {
            "history": torch.randint(-1, vocab, (rows, 9), generator=g, dtype=torch.int32),
            "prompt_lens": torch.randint(0, 9, (rows,), generator=g, dtype=torch.int32),
            "penalties": torch.rand(rows, 3, generator=g) + 0.5,
        }
    if biased:
        extra |= {
            "bias_ids": torch.randint(-1, vocab, (rows, 3), generator=g, dtype=torch.int32),
            "bias_values": torch.randn(rows, 3, generator=g),
        }
    order = [argument.name for argument in torch.ops.trtspec.process_logits.default._schema.arguments]
    kept = {"top_ps": torch.empty(0), "min_ps": torch.empty(0)}  # test_triton_logits.py tests their edges
    ordered = [(arguments | kept | extra)[name] for name in order]
    assert torch.equal(process_logits(*ordered), reference("process_logits", *ordered))


def test_strided_arguments_are_read_as_they_are() -> None:
    arguments = complete({"logits": spread(2, 6, 100), **everything(6)})
    picked = {name: value[::2] for name, value in arguments.items()}
    picked["logits"] = arguments["logits"][::2, ::2]
    packed = {name: value.contiguous() for name, value in picked.items()}
    assert same(process_logits(**picked, **NO_GROUPS), process_rows(**packed))


def test_strided_drafts_are_accepted_as_they_are() -> None:
    """Drafts may be strided, as where a step takes only some of them, or none."""
    g = torch.Generator().manual_seed(0)
    sampled, drafts = torch.randint(0, 2, (6, 10), generator=g), torch.randint(0, 2, (6, 9), generator=g)
    emits, off = torch.arange(6) != 2, torch.full((6,), -1, dtype=torch.int32)
    for K in (3, 0):
        arguments = sampled[:, : K + 1], drafts[:, :K], torch.full((6,), K, dtype=torch.int32), off, emits
        for got, wanted in zip(spec_accept(*arguments), reference("spec_accept", *arguments), strict=True):
            assert torch.equal(got, wanted)


# --- draws ------------------------------------------------------------------------------------------------------------


@st.composite
def long_rows(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw rows of several parts: flat, tied over parts, peaked, removed but for a few, with NaN, or nothing left."""
    rows, vocab = draw(st.integers(1, 3)), draw(st.sampled_from([PART + 1, 2 * PART, 2 * PART + 1001]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, vocab, generator=g)
    for row in range(rows):
        match draw(st.sampled_from(["flat", "tied", "normal", "few", "broken", "none"])):
            case "flat":
                x[row] = 0
            case "tied":
                x[row] = x[row].clamp(max=1.0)
            case "few":
                x[row, torch.rand(vocab, generator=g) < 0.999] = -INF
            case "broken":
                x[row, draw(st.integers(0, vocab - 1))] = float("nan")
            case "none":
                x[row] = -INF
    own = draw(st.booleans())
    return {
        "logits": x,
        "greedy": torch.rand(rows, generator=g) < 0.4,
        "seeds": torch.tensor([draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(rows)]),
        "positions": torch.tensor([draw(st.integers(0, 2**40)) for _ in range(rows)]),
        "vocab_ids": torch.randperm(3 * vocab, generator=g)[:vocab] if own else NO_IDS,
    }


@settings(deadline=None, max_examples=30)
@given(long_rows())
def test_long_rows_draw_the_reference_s_tokens(arguments: dict[str, Tensor]) -> None:
    assert torch.equal(spec_sample(**arguments), reference("spec_sample", **arguments))


@settings(deadline=None, max_examples=30)
@given(batches.sample() | batches.sample(vocab_ids=True), st.booleans())
def test_a_program_draws_from_a_whole_row(arguments: dict[str, Tensor], tied: bool) -> None:
    """The kernels that TensorRT launches draw from a whole row in one program, block after block."""
    if tied:
        arguments["logits"] = arguments["logits"].clamp(max=0.5)
    ids, seeds = arguments.pop("vocab_ids", NO_IDS), arguments["seeds"]
    rows, vocab = arguments["logits"].shape
    tokens, sizes = torch.empty(rows, dtype=torch.int64), (vocab, len(seeds))
    if len(ids):
        spec_sample_kernel[(rows,)](*arguments.values(), ids, *sizes, tokens, OWN_IDS=True, BLOCK=256)
    else:
        spec_sample_dense_kernel[(rows,)](*arguments.values(), *sizes, tokens, OWN_IDS=False, BLOCK=256)
    assert torch.equal(tokens, reference("spec_sample", **arguments, vocab_ids=ids))
