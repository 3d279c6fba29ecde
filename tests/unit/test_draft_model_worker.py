"""Rows and positions of a draft model inside the target's graph, on batches of the engine's own input builder."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.unit.table_worker import VOCAB, built_inputs, expected_verdict, half_right, on_random_batches, random_batch
from trtspec.core import StepOutputs
from trtspec.engine.scheduler import Scheduled
from trtspec.methods.draft_model.worker import DraftModelWorker
from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend, PagedAttend

K = 4


@dataclass
class Pass:
    """Inputs of a pass of the model: the tokens of each request, by position, and the KV lengths."""

    tokens: list[dict[int, int]]
    kv_lens: list[int]


class Watched(DraftHead):
    """A head that predicts the successor of each token."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.passes: list[Pass] = []

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(attend, PagedAttend)
        assert len(self.passes) == step
        attn = attend.attn
        assert len(input_ids) == len(positions) == attn.cu_q_lens[-1]
        assert torch.equal(positions, attn.positions(len(input_ids)))
        owners, tokens = attn.requests(len(input_ids)).tolist(), [dict[int, int]() for _ in attn.kv_lens]
        for owner, position, token in zip(owners, positions.tolist(), input_ids.tolist(), strict=True):
            tokens[owner][position] = token
        self.passes.append(Pass(tokens, attn.kv_lens.tolist()))
        drafting = input_ids if rows is None else input_ids[rows]
        return torch.nn.functional.one_hot((drafting + 1) % VOCAB, VOCAB).float()

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return y

    def weight_bytes_for(self, num_passes: int) -> int:
        return 0


def run(batch: tuple[Scheduled, ...], rng: random.Random, k: int) -> tuple[Watched, StepOutputs, list[list[int]]]:
    """Run a step and return the model, the step's outputs, and each request's tokens after the step."""
    inputs = built_inputs(batch, k)
    logits, model = half_right(rng, inputs), Watched()
    worker = DraftModelWorker(model, K, ())
    outputs = worker(inputs, torch.empty(len(inputs.input_ids), 0), logits, PagedAttend(inputs.attn, [], ()))
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    texts = [row.request.tokens + expected_verdict(row, said[b]) for b, row in enumerate(batch)]
    return model, outputs, texts


@on_random_batches
def test_every_token_is_read_in_at_its_own_place(seed: int) -> None:
    """The first pass has all of the step's rows and one more per request, each at its own position.

    The last valid row is the token just drawn, or the prompt's next token.
    """
    rng = random.Random(seed)
    batch = random_batch(rng)
    model, outputs, texts = run(batch, rng, rng.randint(0, K))
    assert outputs.next_kv_lens is not None
    for b, row in enumerate(batch):
        kept = int(outputs.next_kv_lens[b])
        start = row.request.kv.committed
        read = model.passes[0].tokens[b]
        assert list(read) == list(range(start, start + row.num_rows + 1))
        assert [read[position] for position in range(start, kept + 1)] == texts[b][start : kept + 1]


@on_random_batches
def test_the_chain_goes_on_after_the_token_just_drawn(seed: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng)
    k = rng.randint(1, K)
    model, outputs, texts = run(batch, rng, k)
    assert outputs.next_kv_lens is not None
    assert outputs.proposal is not None
    assert len(model.passes) == k
    for b, row in enumerate(batch):
        if row.emits:
            kept, last = int(outputs.next_kv_lens[b]), texts[b][-1]
            drafts = [(last + 1 + j) % VOCAB for j in range(k)]
            assert outputs.proposal.draft_tokens[b].tolist() == drafts
            for j in range(1, k):
                assert model.passes[j].tokens[b] == {kept + j: drafts[j - 1]}


@on_random_batches
def test_all_rows_are_within_what_is_reserved(seed: int) -> None:
    """No pass goes past the K tokens that the scheduler reserves after the rows of a step.

    Rows further on would go to the scratch block.
    """
    rng = random.Random(seed)
    batch = random_batch(rng)
    model, _, _ = run(batch, rng, K)
    for b, row in enumerate(batch):
        longest = max(one.kv_lens[b] for one in model.passes)
        assert longest <= row.end + K
