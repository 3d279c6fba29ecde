"""Drafts of every one-engine worker: target ids, their noise, banned tokens, and rows with nothing to draw from.

The worker and its batches are those of table_worker.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.table_worker import (
    GREEDY,
    TARGET_IDS,
    VOCAB,
    Tables,
    built_inputs,
    half_right,
    on_random_batches,
    random_batch,
    request,
    run,
)
from trtspec.core import SamplingTensors
from trtspec.engine.scheduler import Scheduled
from trtspec.methods.draw import draw
from trtspec.sampling_params import RequestSampling


def with_row(logits: Tensor) -> Tensor:
    """Hidden states from which Tables reads these logits."""
    return torch.cat((logits, torch.zeros(len(logits), 1)), dim=1)


def test_greedy_drafts_are_target_ids() -> None:
    logits = torch.eye(7)
    worker = Tables()
    assert worker.draft_sampler_greedy(logits, worker.d2t).tolist() == TARGET_IDS.tolist()
    assert worker.draft_sampler_greedy(torch.zeros(1, 7), worker.d2t).tolist() == [7]  # ties: the lowest draft id


def sampled(seed: int) -> RequestSampling:
    return RequestSampling(greedy=False, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


def test_drafts_use_the_noise_of_the_target_ids_they_stand_for() -> None:
    """A draft with the target's distribution, over the same ids in another order, always draws the target's token."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))
    worker = Tables(target_ids=ids)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(9))
    tensors = SamplingTensors.of([sampled(seed) for seed in range(200)], list(range(200)))
    wanted = draw(logits, tensors)
    assert len(set(wanted.tolist())) > 10
    assert worker.sample_drafts(0, with_row(logits[:, ids]), tensors).tolist() == wanted.tolist()


def test_a_worker_told_to_be_greedy_ignores_how_requests_sample() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(9))
    tensors = SamplingTensors.of([sampled(seed) for seed in range(50)], list(range(50)))
    best = TARGET_IDS[logits.argmax(-1)].tolist()
    assert Tables(greedy=True).sample_drafts(0, with_row(logits), tensors).tolist() == best
    assert Tables().sample_drafts(0, with_row(logits), tensors).tolist() != best


def test_banned_target_ids_are_not_drafted_until_their_time() -> None:
    """Bans are ids of the target, and are found among the draft's: 19 is draft id 2.

    The 2 in the bans does not mean draft id 3, which stands for 3. The draft cannot say 4 and 8, so they ban nothing.
    """
    banned = replace(GREEDY, ban_ids=(19, 4, 8), ban_until=10)
    favourite = torch.tensor([[0.0, 3.0, 9.0, 2.0, 1.0, 0.0, 0.0]])  # 19, then 2, then 3
    worker = Tables()
    drafts = [
        worker.sample_drafts(0, with_row(favourite), SamplingTensors.of([banned], [t])).item() for t in (8, 9, 10, 11)
    ]
    assert drafts == [2, 2, 19, 19]
    also_2, only_4 = (replace(GREEDY, ban_ids=ids, ban_until=10) for ids in ((2, 19), (4,)))
    tensors = SamplingTensors.of([also_2, only_4], [0, 0])  # the shorter list is padded, which bans nothing
    assert worker.sample_drafts(0, with_row(favourite.repeat(2, 1)), tensors).tolist() == [3, 19]


def test_bans_move_with_the_chain() -> None:
    """With min_tokens, an id that is banned at the first draft's position may be drawn at the second's."""
    row = request(0, [1, 1, 1], 3, 0, [])
    row.sampling = replace(GREEDY, ban_ids=(19,), ban_until=5)  # tokens 3 and 4 must not be it
    worker = Tables()
    worker.table[:] = torch.tensor([0.0, 1.0, 9.0, 0.0, 0.0, 0.0, 0.0])  # always 19, else 2
    inputs = built_inputs((Scheduled(row, 3, 0, True),), next_draft_len=3)
    outputs = run(worker, inputs, torch.zeros(1, VOCAB))
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.tolist() == [[2, 19, 19]]  # tokens 4, 5, 6


@pytest.mark.parametrize("logits", [torch.zeros(1, 7), torch.full((1, 7), float("nan"))], ids=["banned", "NaN"])
def test_a_draft_that_can_say_nothing_says_anything(logits: Tensor) -> None:
    """A guess must not fail a request: without any token to draw, it is still an id of the target."""
    nothing = replace(GREEDY, ban_ids=tuple(TARGET_IDS.tolist()), ban_until=10)
    for worker in (Tables(), Tables(greedy=True)):
        assert 0 <= worker.sample_drafts(0, with_row(logits), SamplingTensors.of([nothing], [0])).item() < VOCAB


def test_nothing_to_draw_from_reaches_neither_table_nor_kv() -> None:
    """NaN logits of one request draw an id past the end of every table. The other requests' drafts do not change."""
    inputs = built_inputs(random_batch(random.Random(5)))
    logits = half_right(random.Random(5), inputs)
    alone = run(Tables(), inputs, logits)
    broken = logits.clone()
    broken[inputs.spec.logits_rows()[-1]] = float("nan")
    outputs = run(Tables(), inputs, broken)
    assert outputs.verdict is not None
    assert outputs.verdict.tokens[-1, 0] == 2**63 - 1
    assert alone.proposal is not None
    assert outputs.proposal is not None
    assert torch.equal(outputs.proposal.draft_tokens[:-1], alone.proposal.draft_tokens[:-1])


@on_random_batches
def test_drafts_are_cut_where_their_probability_falls_below_the_threshold(seed: int) -> None:
    """The probability of a draft is that of all drafts up to it, in softmax of the table, whatever the temperature."""
    rng = random.Random(seed)
    batch, threshold = random_batch(rng), rng.choice((0.0, 0.001, 0.05, 0.3))
    for row in batch:
        row.request.sampling = rng.choice((GREEDY, sampled(rng.randrange(100))))
    inputs = built_inputs(batch, 4)
    worker = Tables()
    worker.confidence_threshold = threshold
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.proposal is not None
    likely = worker.table.double().softmax(1)
    ids = worker.draft_ids.tolist()
    for b, count in enumerate(outputs.verdict.num_tokens.tolist()):
        if count == 0:
            continue  # a chunk of a prompt drafts nothing that is read
        before, product, wanted = int(outputs.verdict.tokens[b, count - 1]), 1.0, 0
        for draft in outputs.proposal.draft_tokens[b].tolist():
            product *= float(likely[before, ids[draft]])
            if product < threshold:
                break
            before, wanted = draft, wanted + 1
        assert int(outputs.proposal.draft_lens[b]) == wanted


@pytest.mark.parametrize("draft_len", [0, 4])
def test_scores_are_the_probabilities_of_drafts(draft_len: int) -> None:
    """Each is that of its draft after the one before it, in softmax of the table, whatever the temperature."""
    rng = random.Random(3)
    batch = random_batch(rng)
    for row in batch:
        row.request.sampling = rng.choice((GREEDY, sampled(rng.randrange(100))))
    inputs = built_inputs(batch, draft_len)
    worker = Tables()
    worker.gives_scores = True
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.proposal is not None
    assert outputs.proposal.draft_lens.tolist() == [draft_len] * len(batch), "all of them may be verified"
    scores, likely, ids = outputs.proposal.draft_scores, worker.table.double().softmax(1), worker.draft_ids.tolist()
    assert scores is not None
    assert scores.shape == (len(batch), draft_len)
    for b, count in enumerate(outputs.verdict.num_tokens.tolist()):
        if count:  # else a chunk of a prompt, which drafts nothing that is read
            tokens = [int(outputs.verdict.tokens[b, count - 1]), *outputs.proposal.draft_tokens[b].tolist()]
            wanted = [float(likely[before, ids[draft]]) for before, draft in itertools.pairwise(tokens)]
            assert scores[b].tolist() == pytest.approx(wanted)


def test_a_draft_of_no_probability_is_cut() -> None:
    lens = torch.full((3,), 2, dtype=torch.int32)
    probs = [torch.tensor([0.5, float("nan"), 0.5]), torch.tensor([0.5, 1.0, float("nan")])]
    worker = Tables()
    assert worker.likely_lens(lens, probs) is lens  # nobody asked
    worker.confidence_threshold = 0.25
    assert worker.likely_lens(lens, probs).tolist() == [2, 0, 1]
    assert worker.likely_lens(lens.clamp(max=1), probs).tolist() == [1, 0, 1]
