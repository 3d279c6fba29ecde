"""The work of every one-engine worker around its draft layers: draw, accept, rewind, and the rows of drafts.

The worker here has layers that are tables: their output for a token is known without any arithmetic. Batches come from
the engine's own input builder, so they are the ones that workers get in the engine.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import pytest
import torch

from tests.unit.table_worker import (
    TARGET_IDS,
    VOCAB,
    Tables,
    built_inputs,
    expected_verdict,
    half_right,
    on_random_batches,
    random_batch,
    run,
)
from trtspec.engine.scheduler import Scheduled
from trtspec.kv.rewind import commit
from trtspec.methods.worker import SpecWorker

# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "sample_and_accept_draft_tokens",
        "apply_force_accepted_tokens",
        "draft_sampler_greedy",
        "prepare_next_new_tokens",
        "prepare_context_input_ids",
        "sample_tokens_for_batch",
    ],
)
def test_names_that_someone_from_tensorrt_llm_looks_for(name: str) -> None:
    method = getattr(SpecWorker, name)
    assert inspect.isfunction(method)
    assert method.__doc__


# -- the step, on every kind of batch ------------------------------------------------------------------------------


@on_random_batches
def test_tokens_are_those_of_strict_acceptance(seed: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = built_inputs(batch)
    logits = half_right(rng, inputs)
    outputs = run(Tables(), inputs, logits)
    assert outputs.verdict is not None
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    for b, row in enumerate(batch):
        wanted = expected_verdict(row, said[b])
        width = inputs.spec.runtime_draft_len + 1
        assert outputs.verdict.tokens[b].tolist() == wanted + [-1] * (width - len(wanted))
        assert outputs.verdict.num_tokens[b] == len(wanted)


@on_random_batches
def test_the_first_pass_reads_the_token_after_each_row(seed: int) -> None:
    """In a prompt, and after a chunk, the first pass reads the prompt's next token.

    Then it reads the accepted tokens. For rejected rows it may read any token.
    """
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = built_inputs(batch)
    worker, logits = Tables(), half_right(rng, inputs)
    run(worker, inputs, logits)
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    read, positions = worker.calls[0].tokens.tolist(), worker.calls[0].positions.tolist()
    assert len(read) == len(inputs.input_ids)
    assert all(0 <= token < VOCAB for token in read)
    at = 0
    for b, row in enumerate(batch):
        text = row.request.tokens + expected_verdict(row, said[b])
        for position in range(row.request.kv.committed, row.end):
            assert positions[at] == position
            assert position + 1 >= len(text) or read[at] == text[position + 1]
            at += 1


@on_random_batches
def test_what_is_kept_is_what_the_engine_commits(seed: int) -> None:
    """next_kv_lens is what rewind.commit keeps, and next_new_tokens what the input builder packs for the next step."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = built_inputs(batch)
    outputs = run(Tables(), inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.next_kv_lens is not None
    assert outputs.next_new_tokens is not None
    assert outputs.proposal is not None
    assert outputs.next_kv_lens.dtype == inputs.attn.kv_lens.dtype
    for b, row in enumerate(batch):
        count = int(outputs.verdict.num_tokens[b])
        drafts = outputs.proposal.draft_tokens[b].tolist()
        commit(row.request.kv, row.num_rows, count, row.draft_len, draft_layers=True)
        assert outputs.next_kv_lens[b] == row.request.kv.committed == row.request.kv.draft_kv_len
        if count:
            row.request.tokens += outputs.verdict.tokens[b, :count].tolist()
            row.request.drafts = drafts
            following = built_inputs((Scheduled(row.request, 1 + len(drafts), len(drafts), False),))
            assert outputs.next_new_tokens[b].tolist() == following.input_ids.tolist()


@on_random_batches
def test_each_draft_follows_from_the_one_before(seed: int) -> None:
    """The chain starts at the row of the last kept token, and goes on one position and one draw further each pass."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    K = rng.randint(1, 4)
    inputs = built_inputs(batch, K)
    worker = Tables()
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.proposal is not None
    assert outputs.next_kv_lens is not None
    drafts = outputs.proposal.draft_tokens
    assert drafts.shape == (len(batch), K)
    assert outputs.proposal.draft_lens.tolist() == [K] * len(batch)
    assert [call.step for call in worker.calls] == list(range(K))
    starts = inputs.attn.cu_q_lens.tolist()
    for b, row in enumerate(batch):
        if not row.emits:
            continue
        kept = int(outputs.next_kv_lens[b])
        token = int(outputs.verdict.tokens[b, int(outputs.verdict.num_tokens[b]) - 1])
        for j in range(K):
            assert drafts[b, j] == TARGET_IDS[worker.table[token].argmax()]
            assert worker.places[j][b] == kept + 1 + j  # kept tokens, the one just drawn, earlier drafts
            if j > 0:
                call = worker.calls[j]
                assert call.tokens[b] == token
                assert call.positions[b] == kept + j - 1
                assert call.kv_lens[b] == kept + j
                assert call.hidden is not None
                assert call.hidden[b, -1] == starts[b] + kept - row.request.kv.committed - 1  # of that row, all along
            token = int(drafts[b, j])


def test_without_drafts_wanted_the_draft_layers_run_all_the_same() -> None:
    """With K' = 0 the draft layers run all the same, as their KV has to stay complete."""
    rng = random.Random(1)
    inputs = built_inputs(random_batch(rng), next_draft_len=0)
    worker = Tables()
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.shape == (inputs.spec.batch_size, 0)
    assert outputs.proposal.draft_lens.tolist() == [0] * inputs.spec.batch_size
    assert [call.step for call in worker.calls] == [0]


@pytest.mark.parametrize("forced", [0, 1, 2, 9])
def test_forced_acceptance_is_for_generation_rows(forced: int) -> None:
    """Whatever the tensor says of a context has no effect: a context has no drafts."""
    for seed in range(40):
        rng = random.Random(seed)
        batch = random_batch(rng)
        inputs = built_inputs(batch, forced=forced)
        everyone = torch.full_like(inputs.spec.forced_accept, forced)
        inputs = replace(inputs, spec=replace(inputs.spec, forced_accept=everyone))
        logits = half_right(rng, inputs)
        outputs = run(Tables(), inputs, logits)
        assert outputs.verdict is not None
        said = inputs.spec.per_request(logits.argmax(-1)).tolist()
        wanted = [len(expected_verdict(row, said[b], forced)) for b, row in enumerate(batch)]
        assert outputs.verdict.num_tokens.tolist() == wanted
        contexts = [not row.is_context for row in batch]
        applied = Tables().apply_force_accepted_tokens(inputs.spec).tolist()
        assert applied == [forced if generates else -1 for generates in contexts]
