"""Rows of drafting in parallel, on batches of the engine's own input builder."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.unit.table_worker import VOCAB, built_inputs, expected_verdict, half_right, on_random_batches, random_batch
from trtspec.core import AttnMetadata, SamplingTensors, StepOutputs
from trtspec.engine.scheduler import Scheduled
from trtspec.methods.dflash.worker import block_rows
from trtspec.methods.head import DraftHead
from trtspec.methods.parallel.worker import MaskWorker, ParallelWorker, PardWorker, PEagleWorker
from trtspec.models.attention import Attend, PagedAttend

K, MASK = 4, 13
STATE_OF_MASKS = -1.0


@dataclass
class Row:
    """The head's input at a position."""

    token: int
    state: float  # index of the step's row whose state it got, or STATE_OF_MASKS


class Watched(DraftHead):
    """A head that predicts, in every row, the position of the row, modulo VOCAB."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.mask_hidden = torch.tensor([STATE_OF_MASKS])
        self.rows: list[dict[int, Row]] = []  # of each request, by position
        self.kv_lens: list[int] = []

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
        assert not self.rows  # one pass
        attn = attend.attn
        assert len(input_ids) == len(positions) == attn.cu_q_lens[-1]
        self.kv_lens, self.rows = attn.kv_lens.tolist(), [{} for _ in attn.kv_lens]
        owners, states = attn.requests(len(input_ids)).tolist(), h[:, 0].tolist() if len(h) == len(input_ids) else None
        for i, (owner, position, token) in enumerate(zip(owners, positions.tolist(), input_ids.tolist(), strict=True)):
            self.rows[owner][position] = Row(token, states[i] if states else 0.0)
        return (positions if rows is None else positions[rows])[:, None].float()

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return torch.nn.functional.one_hot(y[:, 0].long() % VOCAB, VOCAB).float()

    def weight_bytes_for(self, num_passes: int) -> int:
        return 0


def run(
    kind: type[ParallelWorker], seed: int, k: int
) -> tuple[Watched, StepOutputs, tuple[Scheduled, ...], list[list[int]], list[int]]:
    """Run a step on a random batch.

    Returns the head, the step's outputs, the batch, each request's tokens after the step, and the positions of the
    draws.
    """
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = built_inputs(batch, k)
    logits, head = half_right(rng, inputs), Watched()
    places: list[int] = []

    class Noting(kind):  # type: ignore[valid-type, misc]
        def sample_drafts(
            self, step: int, hidden: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None
        ) -> Tensor:
            places.extend(sampling.positions.tolist())
            return super().sample_drafts(step, hidden, sampling, probs)  # type: ignore[no-any-return]

    worker = Noting(head, K, (), mask_token_id=MASK)
    captured = torch.arange(len(inputs.input_ids))[:, None].float()
    outputs = worker(inputs, captured, logits, PagedAttend(inputs.attn, [], ()))
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    texts = [row.request.tokens + expected_verdict(row, said[b]) for b, row in enumerate(batch)]
    return head, outputs, batch, texts, places


@pytest.mark.parametrize("kind", [MaskWorker, ParallelWorker])
def test_a_worker_that_does_not_say_its_rows_cannot_be_made(kind: type[MaskWorker]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind(Watched(), K, (), mask_token_id=MASK)


@pytest.mark.parametrize("kind", [PardWorker, PEagleWorker])
@on_random_batches
def test_tokens_that_are_kept_and_then_masks(kind: type[ParallelWorker], seed: int) -> None:
    k = seed % (K + 1)
    head, outputs, batch, texts, _ = run(kind, seed, k)
    assert outputs.next_kv_lens is not None
    lead, first = kind.lead, 0
    for b, row in enumerate(batch):
        start, kept = row.request.kv.committed, int(outputs.next_kv_lens[b])
        rows = head.rows[b]
        assert list(rows) == list(range(start, start + row.num_rows + lead + max(k, 1) - 1))
        tokens = [rows[position].token for position in range(start, kept + lead)]
        assert tokens == texts[b][start + 1 - lead : kept + 1]
        masks = [row for position, row in rows.items() if position >= kept + lead]
        assert {mask.token for mask in masks} <= {MASK}
        assert len(masks) >= max(k, 1) - 1
        assert head.kv_lens[b] <= row.end + K  # what is reserved
        if not lead:
            assert [rows[start + i].state for i in range(kept - start)] == list(range(first, first + kept - start))
            assert {mask.state for mask in masks} <= {STATE_OF_MASKS}
        first += row.num_rows


@pytest.mark.parametrize("kind", [PardWorker, PEagleWorker])
@on_random_batches
def test_drafts_are_drawn_after_the_last_token(kind: type[ParallelWorker], seed: int) -> None:
    """Drafts are drawn at the last token's row and those of the masks after it.

    Each draw has the position of the token that it guesses.
    """
    k = 1 + seed % K
    _, outputs, batch, _, places = run(kind, seed, k)
    assert outputs.next_kv_lens is not None
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.shape == (len(batch), k)
    for b, row in enumerate(batch):
        if row.emits:
            kept = int(outputs.next_kv_lens[b])
            assert places[b * k : (b + 1) * k] == [kept + 1 + j for j in range(k)]
            said = [(kept - 1 + kind.lead + j) % VOCAB for j in range(k)]
            assert outputs.proposal.draft_tokens[b].tolist() == said


@pytest.mark.parametrize("kind", [PardWorker, PEagleWorker])
def test_without_drafts_wanted_tokens_are_read_in_all_the_same(kind: type[ParallelWorker]) -> None:
    head, outputs, batch, _, places = run(kind, 7, 0)
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.shape == (len(batch), 0)
    assert not places
    assert all(len(rows) == row.num_rows + kind.lead for rows, row in zip(head.rows, batch, strict=True))


@pytest.mark.parametrize("width", [2, 31, 32, 33, 70])
def test_rows_of_a_dflash_block_see_those_that_have_a_place(width: int) -> None:
    """Rows of a block see the rows that have a slot in a KV block.

    The blocks come after 6, 3 and 10 tokens, in tables of equally many blocks of 4. The last has one block less than it
    needs.
    """
    kept = torch.tensor([6, 3, 10], dtype=torch.int32)
    columns = -(-(10 + width) // 4)
    tables = torch.arange(1, 3 * columns + 1, dtype=torch.int32).view(3, columns)
    tables[2, -1] = 0
    attn = AttnMetadata(torch.tensor([0, 1, 2, 3]), kept, tables, torch.empty(0, dtype=torch.int32))
    block = block_rows(attn, kept, width, tables, 4)
    assert block.kv_lens.tolist() == [6 + width, 3 + width, 10 + width]
    assert block.tree_mask.shape == (3 * width, -(-width // 32))
    covered = [width, width, 4 * (columns - 1) - 10]
    for row, words in enumerate(block.tree_mask.tolist()):
        seen = [bool(words[j // 32] >> (j % 32) & 1) for j in range(32 * len(words))]
        assert seen == [j < covered[row // width] for j in range(len(seen))]
