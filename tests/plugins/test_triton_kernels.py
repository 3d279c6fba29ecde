"""The Triton kernels against the references, in Triton's interpreter (make test runs these)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton.accept import spec_accept
from trtspec_plugins.triton.compact import kv_compact_
from trtspec_plugins.triton.sample import spec_sample

from tests.contract import batches
from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from tests.plugins.references import reference

NONE = torch.empty(0, dtype=torch.int64)


@settings(deadline=None, max_examples=40)
@given(batches.accept())
def test_acceptance_is_the_reference_s(arguments: dict[str, Tensor]) -> None:
    for got, wanted in zip(spec_accept(**arguments), reference("spec_accept", **arguments), strict=True):
        assert torch.equal(got, wanted)


@settings(deadline=None, max_examples=30)
@given(batches.sample())
def test_samples_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    assert torch.equal(spec_sample(**arguments, vocab_ids=NONE), reference("spec_sample", **arguments, vocab_ids=NONE))


@settings(deadline=None, max_examples=30)
@given(batches.sample(vocab_ids=True))
def test_samples_of_a_draft_s_vocabulary_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    assert torch.equal(spec_sample(**arguments), reference("spec_sample", **arguments))


def test_flat_logits_draw_by_noise_alone() -> None:
    """Noise alone picks one of 9001 tokens, in several blocks, so every bit of the noise counts."""
    rows, vocab = 16, 9001
    arguments = {
        "logits": torch.zeros(rows, vocab),
        "greedy": torch.zeros(rows, dtype=torch.bool),
        "seeds": torch.arange(rows) * 0x123456789ABC - 5,
        "positions": torch.arange(rows) * 2**29,
        "vocab_ids": NONE,
    }
    assert torch.equal(spec_sample(**arguments), reference("spec_sample", **arguments))


@pytest.mark.parametrize("own_ids", [False, True])
def test_ties_go_to_the_lowest_id(own_ids: bool) -> None:
    """Ties go to the lowest id within a counter, within a block and across blocks."""
    vocab = 9000
    ids = torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(1))[:vocab]
    logits = torch.zeros(4, vocab)
    logits[1, 1000:] = 1
    logits[2, 3] = logits[2, 2] = logits[2, 8999] = 2
    logits[3, 8999] = logits[3, 5000] = 2
    arguments = {
        "logits": logits,
        "greedy": torch.ones(4, dtype=torch.bool),
        "seeds": torch.arange(4),
        "positions": torch.arange(4),
        "vocab_ids": ids if own_ids else NONE,
    }
    drawn = spec_sample(**arguments)
    assert torch.equal(drawn, reference("spec_sample", **arguments))
    if not own_ids:
        assert drawn.tolist() == [0, 1000, 2, 5000]


# --- compaction -------------------------------------------------------------------------------------------------------


def interpretable(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments with fp32 in place of bf16, which the interpreter gets wrong without an error."""
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in arguments.items()}


def check_compaction(arguments: dict[str, Tensor]) -> None:
    """Check all blocks but scratch block 0, where the reference writes padding."""
    wanted = reference("kv_compact", **arguments)
    mine = {name: value.clone() for name, value in arguments.items()}
    kv_compact_(**mine)
    for cache, expected in zip((mine["k_cache"], mine["v_cache"]), wanted, strict=True):
        assert torch.equal(cache[1:], expected[1:])


@settings(deadline=None, max_examples=60)
@given(batches.compact())
def test_compaction_is_the_reference_s(arguments: dict[str, Tensor]) -> None:
    check_compaction(interpretable(arguments))


def wide_paths(length: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return paths of three requests, which reverse, rotate and thin out a path.

    Rows have 3 heads of 200 elements, which several programs share.
    """
    columns, block_size = -(-2 * length // 7) + 1, 7
    caches = torch.randn(2, 3 * columns + 1, block_size, 3, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    line = torch.arange(length)
    return {
        "k_cache": caches[0].clone(),
        "v_cache": caches[1].clone(),
        "block_tables": (torch.arange(3 * columns).flip(0) + 1).view(3, columns).to(torch.int32),
        "starts": torch.tensor([0, 3, 1], dtype=torch.int32),
        "path": torch.stack([line.flip(0), line.roll(1), line * 2]),
    }


@pytest.mark.parametrize("length", [1, 5, 8, 9, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_move_over_each_other(length: int, dtype: torch.dtype) -> None:
    check_compaction(wide_paths(length, dtype))


def test_what_no_column_covers_is_in_scratch() -> None:
    """Rows 7 and 8 of 9 are in scratch, as sources and as targets.

    There is one request, as all requests share scratch.
    """
    arguments = wide_paths(9)
    arguments |= {name: arguments[name][:1].clone() for name in ("starts", "path")}
    arguments["block_tables"] = arguments["block_tables"][:1, :1].clone()
    wanted = reference("kv_compact", **arguments)
    kv_compact_(**arguments)
    assert torch.equal(arguments["k_cache"], wanted[0])
    assert torch.equal(arguments["v_cache"], wanted[1])


def test_padding_is_not_written() -> None:
    arguments = wide_paths(5)
    arguments["path"].fill_(-1)
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    kv_compact_(**arguments)
    assert all(torch.equal(arguments[name], old) for name, old in zip(("k_cache", "v_cache"), before, strict=True))


anything = st.integers(-(2**31), 2**31 - 1) | st.integers(-100, 300)


@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_no_path_leads_past_the_caches(data: st.DataObject) -> None:
    guarded = torch.arange(4 * 5 * 4 * 16.0).view(4, 5, 4, 1, 16)  # k_cache and v_cache, between two walls
    before = guarded.clone()
    near = st.integers(-1, 8)
    draws = {
        "block_tables": (4, anything | st.integers(-3, 8)),
        "starts": (2, near | anything),
        "path": (6, near | anything | st.sampled_from([2**63 - 1, -(2**63), 2**62])),
    }
    numbers = {name: torch.tensor([data.draw(of) for _ in range(count)]) for name, (count, of) in draws.items()}
    kv_compact_(
        guarded[1],
        guarded[2],
        numbers["block_tables"].to(torch.int32).view(2, 2),
        numbers["starts"].to(torch.int32),
        numbers["path"].view(2, 3),
    )
    assert torch.equal(guarded[0], before[0])
    assert torch.equal(guarded[3], before[3])
    assert guarded[1].min() >= before[1].min()  # no value came from a wall, or from the other cache
    assert guarded[1].max() <= before[1].max()
    assert guarded[2].min() >= before[2].min()
    assert guarded[2].max() <= before[2].max()
