"""Shared prefixes under EAGLE3: hits of every length, conversations, samples of one prompt, and forced acceptance."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.e2e import eagle3_cases
from tests.e2e.eagle3_cases import BASE, DTYPES, PLAIN, ROOMY, TIGHT, K, Make, first_difference, plain
from tests.e2e.head_cases import first_wrong_draft, log_plainly, run_watched, watch
from tests.e2e.tiny import Case, assert_all_blocks_free, draw_cases, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.sampling_params import sample_seed

folder = eagle3_cases.folder
make = eagle3_cases.make


SHARED = 10  # blocks of BASE, of 4


@pytest.mark.parametrize(("dtype", "told"), [("float32", False), ("bfloat16", True)])
def test_prefix_hits_of_every_block_count(target: Path, make: Make, dtype: str, told: bool) -> None:
    """Draft KV of a position depends on the token after it, so the last shared block is computed again.

    The draft KV of its last row belongs to the other text.
    """
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(BASE, params)]
    cases += [Case([*BASE[: 4 * n], 15, 15 - n, *BASE[:5]], params) for n in range(SHARED + 1)]
    cases += [Case(BASE, params), Case(BASE[:41], params), Case(BASE[:40], params)]
    hits = [0, *(4 * max(n - 1, 0) for n in range(SHARED + 1)), 36, 36, 32]  # the last row is always computed
    outcomes, answers = plain(target, cases, dtype)
    words = answers if told else None
    with make(K, dtype, **PLAIN) as llm:
        expected = log_plainly(llm, watch(llm, words), cases)
    with make(K, dtype, **ROOMY) as llm:
        head, found = watch(llm, words), []
        for i, case in enumerate(cases):
            before = llm.engine.loop.scheduler.prefix_hit_tokens
            run, seen = run_watched(llm, [case])
            found.append(llm.engine.loop.scheduler.prefix_hit_tokens - before)
            assert run.outcomes == outcomes[i : i + 1]
            assert first_wrong_draft(head, seen, expected) is None
            assert not seen.incomplete
        assert found == hits


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_conversation_that_goes_on(target: Path, make: Make, dtype: str) -> None:
    """Each prompt is the conversation so far and a little more. Blocks that generation filled are found."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    cases, prompt = [], BASE[:9]
    with LLM(target, dtype=dtype, enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = []
        for turn in range(5):
            cases.append(Case(prompt, params))
            outcomes += run_alone(llm.engine, cases[-1:])
            prompt = [*prompt, *outcomes[-1].token_ids, 3, turn]
    answers = [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]
    with make(K, dtype, **PLAIN) as llm:
        expected = log_plainly(llm, watch(llm, answers), cases)
    with make(K, dtype, **ROOMY) as llm:
        head = watch(llm, answers)
        for i, case in enumerate(cases):
            run, seen = run_watched(llm, [case])
            assert run.outcomes == outcomes[i : i + 1]
            assert first_wrong_draft(head, seen, expected) is None
        assert llm.engine.stats.prefix_hit_tokens > sum(len(case.prompt) for case in cases) // 2


def test_samples_of_one_prompt(target: Path, make: Make) -> None:
    """Samples of one prompt share its blocks, including draft KV. Each goes on with its own seed."""
    cases = draw_cases(8, seed=9, most_prompt=40)
    seeds = [[sample_seed(c.params.seed or 0, i) for i in range(3)] for c in cases]
    single = [
        Case(c.prompt, dataclasses.replace(c.params, seed=s)) for c, own in zip(cases, seeds, strict=True) for s in own
    ]
    outcomes, _ = plain(target, single)
    with make(K, **PLAIN) as llm:
        expected = log_plainly(llm, watch(llm), single)
    with make(K, max_batch_size=8, **TIGHT) as llm:
        head = watch(llm)
        run, seen = run_watched(llm, [Case(c.prompt, dataclasses.replace(c.params, n=3)) for c in cases])
        assert first_difference(run.outcomes, outcomes) is None
        assert first_wrong_draft(head, seen, expected) is None
        assert not seen.incomplete
        assert_all_blocks_free(llm)


def test_forced_acceptance(make: Make) -> None:
    """2 drafts a step count as right, whatever they are. The first token after a prompt is not forced."""
    case = Case(BASE, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    with make(K, force_num_accepted_tokens=2, **ROOMY) as llm:
        run = run_together(llm.engine, [case])
    assert [len(e.tokens) for step in run.steps for e in step] == [1, 3, 3, 3, 3, 3, 3, 3, 2]
