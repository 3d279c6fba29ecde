"""spec_attention against torch's own attention, on the same rows: prefill of prompts, and drafts that are verified.

Torch does less work than an engine must do. Its keys and values lie together, request by request. Ours are appended to
the blocks of a cache and found through a block table. The two take turns. Each time is the median of the rounds, and
the ratio is the median of the rounds' ratios. TRTSPEC_CPU_ISA selects another instruction set of the machine.

The second table is of steps of a model of 30 layers, whose caches are larger than the CPU's. Its limit is a probe that
reads memory in the same round.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.kv.memory import huge_pages
from trtspec.ops import kernel_threads, load_plugins, spec_attention_

BLOCK = 16  # tokens of a KV block
LAYERS = 30


@dataclass(frozen=True)
class Case:
    """A batch of equal requests: the last `rows` of each one's `tokens` are the rows of this step."""

    name: str
    requests: int
    rows: int
    tokens: int


CASES = (
    Case("a prompt of 1024", 1, 1024, 1024),
    Case("8 prompts of 175", 8, 175, 175),
    Case("1 row after 300", 1, 1, 300),
    Case("4 rows after 300", 1, 4, 300),
    Case("8 times 1 row after 300", 8, 1, 300),
    Case("8 times 4 rows after 300", 8, 4, 300),
)


STEPS = (
    Case("8 times 1 row after 320", 8, 1, 320),
    Case("8 times 2 rows after 320", 8, 2, 320),
    Case("1 row after 2048", 1, 1, 2048),
    Case("4 rows after 2048", 1, 4, 2048),
    Case("8 times 1 row after 1024", 8, 1, 1024),
)


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a call of spec_attention. q, k, v: [requests, heads, tokens, D]; q has only the rows of the step."""
    blocks = -(-case.tokens // BLOCK)
    caches = []
    for dense in (k, v):
        cache = dense.new_zeros(case.requests, blocks * BLOCK, dense.shape[1], dense.shape[3])
        cache[:, : case.tokens] = dense.transpose(1, 2)
        caches.append(cache.view(-1, BLOCK, dense.shape[1], dense.shape[3]))
    rows = [dense[:, :, -case.rows :].transpose(1, 2).flatten(0, 1).contiguous() for dense in (q, k, v)]
    return call(case, rows, caches, torch.arange(case.requests * blocks))


def call(case: Case, rows: Sequence[Tensor], caches: Sequence[Tensor], blocks: Tensor) -> Callable[[], Tensor]:
    """Return a call of spec_attention. rows: q, k, v [rows, heads, D]. blocks: of all requests, in the caches."""
    bounds = torch.arange(case.requests + 1, dtype=torch.int32) * case.rows
    lengths = torch.full((case.requests,), case.tokens, dtype=torch.int32)
    table = blocks.to(torch.int32).view(case.requests, -1)
    no_tree, no_sinks, scale = torch.empty(0, dtype=torch.int32), torch.empty(0), rows[0].shape[-1] ** -0.5
    return lambda: spec_attention_(*rows, *caches, bounds, lengths, table, no_tree, no_sinks, scale)


def torchs(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    if case.rows == case.tokens:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    seen = torch.ones(case.rows, case.tokens, dtype=torch.bool).tril(case.tokens - case.rows)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def step(case: Case, heads: int, kv_heads: int, width: int) -> tuple[Callable[[], object], int]:
    """Return the attention of all layers of a step, with blocks in any order, and its bytes of keys and values."""
    count = case.requests * -(-case.tokens // BLOCK)
    shape = (LAYERS, 2, count, BLOCK, kv_heads, width)
    memory = torch.frombuffer(huge_pages(2 * math.prod(shape)), dtype=torch.bfloat16).view(shape)
    blocks, calls = torch.randperm(count), []
    for caches in memory:
        caches.normal_()
        rows = [torch.randn(case.requests * case.rows, n, width).bfloat16() for n in (heads, kv_heads, kv_heads)]
        calls.append(call(case, rows, caches.unbind(), blocks))
    return lambda: [one() for one in calls], case.requests * case.tokens * memory[:, :, 0, 0].nbytes


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9, help="of queries (default 9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="of keys and values (default 3)")
    parser.add_argument("--head-dim", type=int, default=64, help="default 64")
    parser.add_argument("--rounds", type=int, default=50, help="default 50")
    args = parser.parse_args()
    name = load_plugins().get("cpu", "reference")
    print(
        f"{name}, {torch.get_num_threads()} threads, bf16, {args.heads} heads over {args.kv_heads} of {args.head_dim}"
    )
    print("\n| rows | us | torch, us | torch / ours |\n|---|---|---|---|")
    for case in CASES:
        q, k, v = (
            torch.randn(case.requests, heads, tokens, args.head_dim).bfloat16()
            for heads, tokens in ((args.heads, case.rows), (args.kv_heads, case.tokens), (args.kv_heads, case.tokens))
        )
        own, other = ours(case, q, k, v), torchs(case, q, k, v)
        found = own().view(case.requests, case.rows, args.heads, -1).transpose(1, 2)
        torch.testing.assert_close(found, other(), atol=0.02, rtol=0.02)
        times = []
        for _ in range(args.rounds):
            with kernel_threads():
                mine = min(seconds(own) for _ in range(3))
            times.append((mine, min(seconds(other) for _ in range(3))))
        mine, others = (1e6 * statistics.median(each) for each in zip(*times, strict=True))
        print(f"| {case.name} | {mine:.0f} | {others:.0f} | {statistics.median(b / a for a, b in times):.2f}x |")

    print(f"\n| rows, {LAYERS} layers | ms | GB/s | of memory |\n|---|---|---|---|")
    probe = torch.frombuffer(huge_pages(2**28), dtype=torch.uint8).fill_(1)
    for case in STEPS:
        work, size = step(case, args.heads, args.kv_heads, args.head_dim)
        took, shares = [], []
        for _ in range(max(args.rounds // 2, 1)):
            memory = torch.ops.trtspec_probe.read_bandwidth(probe)
            with kernel_threads():
                took.append(seconds(work))
            shares.append(size / took[-1] / memory)
        middle = statistics.median(took)
        print(f"| {case.name} | {1e3 * middle:.2f} | {size / middle / 1e9:.1f} | {statistics.median(shares):.2f} |")


if __name__ == "__main__":
    main()
