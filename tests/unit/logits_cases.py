"""Calls of process_logits with some of its arguments, random logits, and transformers' processors on equal logits."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from trtspec.ops import process_logits

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
    """Call process_logits with zero-size tensors for every group that is not named."""
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
    """Random logits with at most nine different values, so that rows have ties."""
    return torch.randint(-4, 5, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()


def theirs(logits: Tensor, *processors: LogitsProcessor, input_ids: Tensor | None = None) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64) if input_ids is None else input_ids
    return LogitsProcessorList(processors)(ids, logits.clone())
