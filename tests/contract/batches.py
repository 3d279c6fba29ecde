"""Random arguments for each op, as ragged batches, in the order of the TensorRT plugins' inputs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

CACHE_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Arguments = dict[str, Tensor]


@st.composite
def attention(draw: st.DrawFn) -> Arguments:
    """Draw B requests with 1 to 6 new rows after 0 to 20 committed tokens, in blocks scattered over the pool."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, block_size = draw(st.sampled_from(CACHE_DTYPES)), draw(st.sampled_from([4, 16]))
    kv_heads, group, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24]))
    new = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    kv_lens = [rows + draw(st.integers(0, 20)) for rows in new]
    columns = max(-(-length // block_size) for length in kv_lens)
    order = torch.randperm(len(new) * columns, generator=g) + 1  # block 0 is scratch
    rows, blocks = sum(new), len(new) * columns + 1
    bounds = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    return {
        "q": random(rows, kv_heads * group, width),
        "k": random(rows, kv_heads, width),
        "v": random(rows, kv_heads, width),
        "k_cache": random(blocks, block_size, kv_heads, width),
        "v_cache": random(blocks, block_size, kv_heads, width),
        "cu_q_lens": bounds,
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "block_tables": order.view(len(new), columns).to(torch.int32),
    }


@st.composite
def logits(draw: st.DrawFn) -> Arguments:
    """Draw R rows of V logits; each group of parameters may be zero-size."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 6)), draw(st.sampled_from([1, 7, 33, 300]))

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        if not draw(st.booleans()):
            return torch.empty(0, dtype=dtype)
        return torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)]).to(dtype)

    bans = draw(st.integers(0, 3))
    return {
        "logits": torch.randn(rows, vocab, generator=g) * 4,
        "positions": torch.randint(0, 9, (rows,), generator=g),
        "ban_ids": torch.randint(-1, vocab, (rows, bans), generator=g, dtype=torch.int32),
        "ban_until": torch.randint(0, 9, (rows, bans), generator=g),
        "temperatures": column([0.0, 0.5, 1.0, 2.0], torch.float32),
        "top_ks": column([0, 1, 3, 400], torch.int32),
        "top_ps": column([0.1, 0.9, 1.0], torch.float32),
        "min_ps": column([0.0, 0.05, 0.5], torch.float32),
    }


LOGITS = {
    "logits": torch.float32, "positions": torch.int64, "history": torch.int32, "prompt_lens": torch.int64,
    "penalties": torch.float32, "bias_ids": torch.int32, "bias_values": torch.float32, "ban_ids": torch.int32,
    "ban_until": torch.int64, "allow_mask": torch.int32, "temperatures": torch.float32, "top_ks": torch.int32,
    "top_ps": torch.float32, "min_ps": torch.float32,
}  # fmt: skip
"""Arguments of process_logits, in order."""


@st.composite
def constrained_logits(draw: st.DrawFn) -> Arguments:
    """Draw arguments as `logits` does, with constraints. Those that are not in use have R rows without elements."""
    plain = draw(logits())
    rows, vocab = plain["logits"].shape
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kinds = draw(st.sampled_from([0, 3]))
    length = draw(st.integers(1, 70)) if kinds else 0
    biases = draw(st.integers(0, min(vocab, 40)))
    words = draw(st.sampled_from([0, -(-vocab // 32)]))
    mask = torch.randint(-(2**31), 2**31, (rows, words), generator=g, dtype=torch.int64)
    off, on = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.5, 0.5, 0.25])
    asked = torch.rand(rows, 3, generator=g) < 0.6
    padded = torch.arange(biases) >= torch.randint(0, biases + 1, (rows, 1), generator=g)
    ids = torch.rand(rows, vocab, generator=g).argsort(1)[:, :biases].masked_fill(padded, -1)
    constraints = {
        "history": torch.randint(-1, vocab, (rows, length), generator=g, dtype=torch.int32),
        "prompt_lens": torch.randint(0, length + 1, (rows,), generator=g),
        "penalties": torch.where(asked, on, off)[:, :kinds].contiguous(),
        "bias_ids": ids.to(torch.int32),
        "bias_values": torch.randn(rows, biases, generator=g) * 3,
        "allow_mask": mask.to(torch.int32),
    }
    given = plain | constraints
    return {name: given[name] for name in LOGITS}


@st.composite
def sample(draw: st.DrawFn, vocab_ids: bool = False) -> Arguments:
    """Draw R rows, some greedy, with ties, NaN and removed tokens."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 6)), draw(st.sampled_from([1, 5, 64, 1030]))
    values = torch.randn(rows, vocab, generator=g).mul(3)
    if draw(st.booleans()):
        values = values.round()  # ties
    values[torch.rand(rows, vocab, generator=g) < 0.2] = float("-inf")
    if draw(st.booleans()):
        values[draw(st.integers(0, rows - 1)), draw(st.integers(0, vocab - 1))] = float("nan")
    if draw(st.booleans()):
        values[draw(st.integers(0, rows - 1))] = float("-inf")
    seeds = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows))
    unseeded = draw(st.booleans())
    arguments = {
        "logits": values,
        "greedy": torch.ones(rows, dtype=torch.bool) if unseeded else torch.rand(rows, generator=g) < 0.3,
        "seeds": torch.tensor([] if unseeded else seeds, dtype=torch.int64),
        "positions": torch.tensor([draw(st.integers(0, 2**40)) for _ in range(rows)]),
    }
    if vocab_ids:
        arguments["vocab_ids"] = torch.randperm(4 * vocab, generator=g)[:vocab]
    return arguments


@st.composite
def accept(draw: st.DrawFn) -> Arguments:
    """Draw B requests with 0 to K drafts, each right four times of five; some are forced, some emit nothing."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    B, K = draw(st.integers(1, 9)), draw(st.sampled_from([0, 1, 3, 8, 40]))
    sampled = torch.randint(0, 2, (B, K + 1), generator=g)
    drafts = sampled[:, :K].clone()
    drafts[torch.rand(B, K, generator=g) < 0.2] = 2
    return {
        "sampled": sampled,
        "draft_tokens": drafts,
        "draft_lens": torch.randint(0, K + 1, (B,), generator=g, dtype=torch.int32),
        "forced_accept": torch.randint(-3, K + 2, (B,), generator=g, dtype=torch.int32).clamp(min=-1),
        "emits": torch.rand(B, generator=g) < 0.8,
    }


@st.composite
def compact(draw: st.DrawFn) -> Arguments:
    """Draw B requests that keep a path of 0 to L tree rows.

    The paths are mostly ascending, as trees have them; others are in any order, or repeat rows.
    """
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, block_size = draw(st.sampled_from(CACHE_DTYPES)), draw(st.sampled_from([4, 16]))
    B, length, tree = draw(st.integers(1, 5)), draw(st.integers(1, 6)), 12
    starts = torch.randint(0, 20, (B,), generator=g, dtype=torch.int32)
    columns = -(-(20 + tree) // block_size)
    path = torch.stack([torch.randperm(tree, generator=g)[:length] for _ in range(B)])
    order = draw(st.sampled_from(["rising", "rising", "any", "repeated"]))
    if order == "rising":
        path = path.sort().values
    elif order == "repeated":
        path = torch.randint(0, length, (B, length), generator=g)
    kept = torch.randint(0, length + 1, (B,), generator=g)
    path[torch.arange(length) >= kept[:, None]] = -1
    shape = (B * columns + 1, block_size, 2, 8)
    return {
        "k_cache": torch.randn(shape, generator=g).to(dtype),
        "v_cache": torch.randn(shape, generator=g).to(dtype),
        "block_tables": (torch.randperm(B * columns, generator=g) + 1).view(B, columns).to(torch.int32),
        "starts": starts,
        "path": path,
    }
