"""Log-probabilities of generated tokens: those of transformers' logits, and the same bits under speculation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from tests.contract.modes import TIGHT, Models
from tests.e2e.tiny import PIECES, VOCAB, Case, run_together
from trtspec import LLM, CompletionOutput, SamplingParams
from trtspec.modes import SpeculativeDecodingMode as M


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models whose requests ask for logprobs, two of three of them. They ask for the 0 to 4 likeliest tokens."""
    made = Models(tmp_path_factory.mktemp("modes"))
    made.cases = [
        Case(case.prompt, dataclasses.replace(case.params, logprobs=i % 5 if i % 3 else None))
        for i, case in enumerate(made.cases[30:60])
    ]
    return made


@pytest.fixture(scope="module")
def oracle(models: Models) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(models.folder("target")).eval()


def run(models: Models, mode: M, **options: Any) -> list[Any]:
    """The logprobs of each request; None if it did not ask."""
    with models.open(mode, 3, "eager", "target", **options) as llm:
        found = run_together(llm.engine, models.cases)
        assert options.get("num_kv_blocks", 0) > 30 or llm.engine.stats.preemptions
        assert found.outcomes == models.plain("target", "eager")
        if mode is not M.NONE:
            assert all(0 < share < 1 for share in found.speculation.acceptance_per_position)
    told = [None if request.logprobs is None else request.logprobs.entries for request in found.requests]
    steps = [(e.request.request_id, entry) for step in found.steps for e in step for entry in e.logprobs or ()]
    for request, entries in zip(found.requests, told, strict=True):
        assert [entry for number, entry in steps if number == request.request_id] == (entries or [])
    return told


@pytest.fixture(scope="module")
def plain(models: Models) -> list[Any]:
    return run(models, M.NONE, num_kv_blocks=200)


def test_they_are_those_of_transformers(models: Models, oracle: Any, plain: list[Any]) -> None:
    outcomes = models.plain("target", "eager")
    checked = 0
    for case, outcome, entries in zip(models.cases, outcomes, plain, strict=True):
        if case.params.logprobs is None:
            assert entries is None
            continue
        assert len(entries) == len(outcome.token_ids)
        with torch.no_grad():
            logits = oracle(torch.tensor([case.prompt + outcome.token_ids])).logits[0]
        want = torch.log_softmax(logits.float(), -1)[len(case.prompt) - 1 :]
        for token, entry, row in zip(outcome.token_ids, entries, want, strict=False):
            assert next(iter(entry)) == token
            top = row.argsort(descending=True).tolist()
            likeliest = [id_ for id_ in entry if id_ != token or entry[id_].rank <= case.params.logprobs]
            assert len(entry) == len(set(entry)) in (case.params.logprobs, case.params.logprobs + 1)
            for id_, one in entry.items():
                assert abs(one.logprob - row[id_].item()) < 1e-4
                assert one.decoded_token == PIECES[id_]
                assert abs(row[top[one.rank - 1]].item() - row[id_].item()) < 1e-4  # the rank, up to ties
            assert sorted(entry[id_].rank for id_ in likeliest) == list(range(1, case.params.logprobs + 1))
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("mode", [M.NONE, M.NGRAM, M.DRAFT_TARGET, M.EAGLE3_ONE_MODEL])
def test_speculation_and_preemption_change_no_bit(models: Models, plain: list[Any], mode: M) -> None:
    assert run(models, mode, **TIGHT) == plain


def test_prefix_reuse_changes_no_bit(models: Models) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
    prompt = [1 + i % (VOCAB - 2) for i in range(40)]
    with LLM(models.folder("target"), block_size=8) as llm:
        first, second = (llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for _ in range(2))
        assert llm.get_metrics().prefix_hit_tokens >= 32
    assert first.logprobs == second.logprobs
    assert first.logprobs is not None


def test_what_callers_are_given(models: Models) -> None:
    """Samples of one prompt have their own logprobs, the same in deltas and outputs.

    A request that asks for none gets none.
    """
    params = SamplingParams(n=2, seed=3, max_tokens=9, logprobs=1, ignore_eos=True)
    with LLM(models.folder("target")) as llm:
        generation = llm.generate_async([1, 2, 3], params)
        deltas = list(generation)
        outputs = generation.result().outputs
        silent = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0]
    for output in outputs:
        own = [one for delta in deltas if delta.index == output.index for one in delta.logprobs or ()]
        assert output.logprobs == own
        assert _total(output) == pytest.approx(output.cumulative_logprob)
    assert (silent.logprobs, silent.cumulative_logprob) == (None, None)


def _total(output: CompletionOutput) -> float:
    assert output.logprobs is not None
    return sum(one[token].logprob for token, one in zip(output.token_ids, output.logprobs, strict=True))


def test_they_are_of_the_model_not_of_what_is_drawn_from(models: Models) -> None:
    """Logprobs are those of the model, whatever a request asks of the sampler and of its logits."""
    asked = {"top_k": 1, "logit_bias": {3: 100.0}, "repetition_penalty": 1.5, "min_tokens": 2}
    with LLM(models.folder("target")) as llm:
        one = llm.generate([[1, 2, 3]], SamplingParams(logprobs=3, max_tokens=2, **asked), use_tqdm=False)[0].outputs[0]
        two = llm.generate(
            [[1, 2, 3]], SamplingParams(temperature=0.0, logprobs=3, max_tokens=1, ignore_eos=True), use_tqdm=False
        )[0].outputs[0]
    assert one.token_ids[0] == 3
    assert one.logprobs is not None
    assert two.logprobs is not None
    shared = one.logprobs[0].keys() & two.logprobs[0].keys()
    assert len(shared) >= 3
    assert all(one.logprobs[0][id_] == two.logprobs[0][id_] for id_ in shared)
