"""The Triton kernels against the references, in Triton's interpreter (make contract-tensorrt runs these)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here: make contract-tensorrt")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make contract-tensorrt", allow_module_level=True)

from trtspec_plugins.triton.accept import spec_accept
from trtspec_plugins.triton.sample import spec_sample

import trtspec.ops
from tests.contract import batches

NONE = torch.empty(0, dtype=torch.int64)


@settings(deadline=None, max_examples=40)
@given(batches.accept())
def test_acceptance_is_the_reference_s(arguments: dict[str, Tensor]) -> None:
    for got, wanted in zip(spec_accept(**arguments), trtspec.ops.spec_accept(**arguments), strict=True):
        assert torch.equal(got, wanted)


@settings(deadline=None, max_examples=30)
@given(batches.sample())
def test_samples_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    assert torch.equal(spec_sample(**arguments, vocab_ids=NONE), trtspec.ops.spec_sample(**arguments, vocab_ids=NONE))


@settings(deadline=None, max_examples=30)
@given(batches.sample(vocab_ids=True))
def test_samples_of_a_draft_s_vocabulary_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    assert torch.equal(spec_sample(**arguments), trtspec.ops.spec_sample(**arguments))


def test_flat_logits_draw_by_noise_alone() -> None:
    """Every bit of the noise counts: 9000 tokens, of which noise alone picks one, several blocks long."""
    rows, vocab = 16, 9001
    arguments = {
        "logits": torch.zeros(rows, vocab),
        "greedy": torch.zeros(rows, dtype=torch.bool),
        "seeds": torch.arange(rows) * 0x123456789ABC - 5,
        "positions": torch.arange(rows) * 2**29,
        "vocab_ids": NONE,
    }
    assert torch.equal(spec_sample(**arguments), trtspec.ops.spec_sample(**arguments))
