"""Every op survives torch.export as one opaque node. The numbers of requests and rows stay open."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from trtspec.ops import kv_compact, packed_linear, process_logits, spec_accept, spec_attention, spec_sample

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, K = 4, 2, 8, 32, 50, 2
OPS = {"packed_linear", "spec_attention", "process_logits", "spec_sample", "spec_accept", "kv_compact"}


class SamplingOps(nn.Module):
    """A layer for the ragged rows of some requests, and K+1 draws for each of them.

    It calls every functional op once.
    """

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.qkv = nn.Parameter(torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, generator=g))

    def forward(
        self, x: Tensor, k_cache: Tensor, v_cache: Tensor, cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor,
        logits: Tensor, seeds: Tensor, drafts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        none, none_f = kv_lens.new_empty(0), x.new_empty(0)
        qkv = packed_linear(x, self.qkv).view(x.shape[0], -1, HEAD_DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        out, k_cache, v_cache = spec_attention(
            q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, none, none_f, HEAD_DIM**-0.5
        )
        processed = process_logits(
            logits, seeds, none, none, none_f, none, none_f, none, none.long(), none,
            seeds.new_full(seeds.shape, 0.7, dtype=torch.float32), none, none_f, none_f,
        )  # fmt: skip
        sampled = spec_sample(processed, seeds < 2, seeds, seeds, none.long()).view(-1, K + 1)
        draft_lens = kv_lens.new_full(kv_lens.shape, K)
        tokens, num_tokens = spec_accept(sampled, drafts, draft_lens, draft_lens - K - 1, kv_lens > 0)
        k_cache, v_cache = kv_compact(k_cache, v_cache, block_tables, kv_lens - K - 1, drafts % 2)
        return out, tokens, num_tokens, k_cache, v_cache


def inputs(num_requests: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs of B requests of 1 to 5 rows each, T rows in all, one block each. Logits have R = B (K+1) rows."""
    B, g = num_requests, torch.Generator().manual_seed(seed)
    q_lens = torch.randint(1, 6, (B,), generator=g)
    return (
        torch.randn(int(q_lens.sum()), HIDDEN, generator=g),
        torch.randn(B + 1, 16, KV_HEADS, HEAD_DIM, generator=g),
        torch.randn(B + 1, 16, KV_HEADS, HEAD_DIM, generator=g),
        torch.tensor([0, *q_lens.cumsum(0)], dtype=torch.int32),
        torch.randint(5, 17, (B,), generator=g, dtype=torch.int32),
        torch.arange(1, B + 1, dtype=torch.int32)[:, None],
        torch.randn(B * (K + 1), VOCAB, generator=g),
        torch.arange(B * (K + 1)),
        torch.randint(0, VOCAB, (B, K), generator=g),
    )


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    B, T = Dim("B", min=2, max=512), Dim("T", min=2, max=4096)
    blocks, bounds, draws = {0: B + 1}, {0: B + 1}, {0: (K + 1) * B}
    shapes = ({0: T}, blocks, blocks, bounds, {0: B}, {0: B}, draws, draws, {0: B})
    return torch.export.export(SamplingOps(), inputs(4), dynamic_shapes=shapes)


def test_each_op_is_one_node(program: torch.export.ExportedProgram) -> None:
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    ours = [op for op in called if isinstance(op, torch._ops.OpOverload) and op.namespace == "trtspec"]
    assert sorted(op._schema.name.removeprefix("trtspec::") for op in ours) == sorted(OPS)


@pytest.mark.parametrize("num_requests", [2, 3, 7, 40])
@pytest.mark.parametrize("seed", [1, 2])
def test_exported_equals_eager_for_any_number_of_requests_and_rows(
    program: torch.export.ExportedProgram, num_requests: int, seed: int
) -> None:
    exported, eager = program.module()(*inputs(num_requests, seed)), SamplingOps()(*inputs(num_requests, seed))
    for a, b in zip(exported, eager, strict=True):
        assert torch.equal(a, b)
