"""A smaller model inside the target's graph makes the same drafts as the same model next to the target.

The reference for drafts is the drafter of DRAFT_TARGET. It is called after every token of every known answer, with one
token more each time. Drafts are compared by ids. The model is the target with noise, so its ids come from every part of
the vocabulary, and wrong draft KV shows in them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import edit_config
from tests.e2e.head_cases import Watch, chunks_of, run_watched
from tests.e2e.recorded import assert_graph_is_step, record
from tests.e2e.tiny import (
    Case,
    Outcome,
    Run,
    assert_all_blocks_free,
    draw_cases,
    make_target,
    perturbed,
    run_alone,
    run_together,
)
from trtspec import LLM, SamplingParams
from trtspec.methods.draft_model.head import DecoderHead
from trtspec.methods.draft_model.worker import DraftModelWorker
from trtspec.methods.step import OneEngineStep
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import sample_seed

K, MOST_K = 3, 5
CASES = draw_cases(24, seed=27, most_prompt=60)
ROOMY: dict[str, Any] = {"num_kv_blocks": 1000, "block_size": 4}
# Up to 84 tokens a request in 24 blocks of 4, so requests are preempted. At most 32 rows a step, so long prompts are
# prefilled in chunks.
TIGHT: dict[str, Any] = {"max_num_tokens": 32, "num_kv_blocks": 25, "block_size": 4}

Place = tuple[int, int, int]
"""Request id, index of the first token its chain guesses, index of the token guessed."""
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(target: Path, draft: Path) -> Make:
    """(K, dtype, fields of the speculation, engine options) -> LLM."""

    def make(k: int = K, dtype: str = "float32", fields: dict[str, Any] | None = None, **options: Any) -> LLM:
        speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k, "one_engine": True}
        return LLM(target, {**speculation, **(fields or {})}, dtype=dtype, **options)

    return make


def two_engine_drafts(llm: LLM, cases: list[Case], answers: list[list[int]], k: int) -> dict[Place, int]:
    """Drafts of the two-engine drafter after each token of the answers.

    Every row of draft KV is computed from known tokens, and a guess is overwritten before it is read again.
    """
    drafter = llm.engine.loop.proposer.drafter
    assert drafter is not None
    requests = [llm.engine.add_request(case.prompt, case.params)[0] for case in cases]
    blocks = [range(1 + 30 * i, 31 + 30 * i) for i in range(len(cases))]
    found: dict[Place, int] = {}
    known = [len(case.prompt) for case in cases]
    valid = [0] * len(cases)
    while going := [i for i, answer in enumerate(answers) if known[i] < len(answer)]:
        asked = []
        for i in going:
            known[i] += 1
            tokens = answers[i][: known[i]]
            asked.append(DraftRequest(i, tokens, k, requests[i].sampling, blocks[i], valid[i]))
            valid[i] = known[i]
        for i, drafts in zip(going, drafter.propose(asked).draft_tokens.tolist(), strict=True):
            found |= {(i, known[i], known[i] + j): token for j, token in enumerate(drafts)}
    return found


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right outcomes of `cases`, and the right drafts on the way."""

    cases: list[Case]
    outcomes: list[Outcome]
    drafts: dict[Place, int]


def refer(target: Path, make: Make, cases: list[Case], dtype: str = "float32", **fields: Any) -> Reference:
    with LLM(target, dtype=dtype, enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = run_alone(llm.engine, cases)
    answers = [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]
    with make(MOST_K, dtype, {"one_engine": False, **fields}, **ROOMY) as llm:
        return Reference(cases, outcomes, two_engine_drafts(llm, cases, answers, MOST_K))


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[str], Reference]:
    """dtype -> the reference of CASES, computed when first asked for."""
    return functools.cache(lambda dtype: refer(target, make, CASES, dtype))


def first_wrong_draft(seen: Watch, expected: dict[Place, int]) -> str | None:
    """Describe the first draft that the model would not make next to the target. None if there is none."""
    assert seen.given
    return next(
        (f"{at}: {token} instead of {expected[at]}" for at, token in seen.given.items() if token != expected[at]), None
    )


def assert_right(llm: LLM, expected: Reference, cases: list[Case] | None = None) -> Run:
    """Check the cases (`cases`, or all of `expected`), run together.

    It checks outputs, drafts, draft KV after each step, and that all blocks are free in the end.
    """
    run, seen = run_watched(llm, cases or expected.cases)
    assert run.outcomes == expected.outcomes[: len(run.outcomes)]
    assert first_wrong_draft(seen, expected.drafts) is None
    assert not seen.incomplete
    assert llm.engine.stats.stale_drafts == 0
    assert_all_blocks_free(llm)
    return run


@pytest.mark.parametrize(("k", "dtype"), [(1, "float32"), (2, "bfloat16"), (5, "float32")])
def test_every_draft_length(make: Make, reference: Callable[[str], Reference], k: int, dtype: str) -> None:
    """Every draft length works in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position, and requests end inside a draft.
    """
    with make(k, dtype, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        run = assert_right(llm, reference(dtype))
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


@pytest.mark.parametrize("rows", [1, 5])
def test_chunks_of_prompts(make: Make, reference: Callable[[str], Reference], rows: int) -> None:
    """Drafts are right for prompts in chunks.

    The draft model reads one token after each chunk, which is the prompt's.
    """
    with make(max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        assert_right(llm, reference("float32"), CASES[:12])
        assert most() == rows


@pytest.mark.parametrize("size", [1, 16])
def test_other_block_sizes(make: Make, reference: Callable[[str], Reference], size: int) -> None:
    """Drafts are right with other block sizes.

    With blocks of one token, and too few of them, a request has exactly the rows that it reserved. A row past those
    would be in the scratch block, which all requests write.
    """
    limits = {**TIGHT, "block_size": size, "num_kv_blocks": 1 + 96 // size}
    with make(MOST_K, max_batch_size=5, **limits) as llm:
        assert_right(llm, reference("float32"))
        assert llm.engine.stats.preemptions > 0


def test_steps_are_those_of_the_draft_next_to_the_target(make: Make) -> None:
    """Each step emits the same tokens and accepts the same drafts as with the draft next to the target.

    Steps that do not read the requests (engine.steady) are included.
    """
    steps = []
    for one_engine in (True, False):
        with make(fields={"one_engine": one_engine}, max_batch_size=8, **ROOMY) as llm:
            run = run_together(llm.engine, CASES)
            steps.append([[(e.tokens, e.num_drafts, e.draft_len) for e in step] for step in run.steps])
    assert steps[0] == steps[1]


def test_arg_max_drafts(target: Path, make: Make) -> None:
    """Arg-max drafts are right. The cases have no min_tokens, because an arg-max inside the launch ignores bans."""
    cases = [Case(case.prompt, dataclasses.replace(case.params, min_tokens=0)) for case in CASES[:16]]
    expected = refer(target, make, cases, draft_sample_method="greedy")
    with make(fields={"draft_sample_method": "greedy"}, max_batch_size=8, **TIGHT) as llm:
        assert_right(llm, expected)


def test_shared_prefixes(target: Path, make: Make) -> None:
    """Draft KV at a position depends on the token at that position, so all draft KV of a shared block can be used.

    Only the last row is always computed again.
    """
    base = [1 + i * i % 14 for i in range(42)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(base, params), *(Case([*base[: 4 * n], 15, 15 - n, *base[:5]], params) for n in range(11))]
    cases += [Case(base, params), Case(base[:41], params), Case(base[:40], params)]
    expected = refer(target, make, cases)
    with make(**ROOMY) as llm:
        found = []
        for i, case in enumerate(cases):  # one after the other
            before = llm.engine.loop.scheduler.prefix_hit_tokens
            run, seen = run_watched(llm, [case])
            found.append(llm.engine.loop.scheduler.prefix_hit_tokens - before)
            assert run.outcomes == expected.outcomes[i : i + 1]
            assert first_wrong_draft(seen, expected.drafts) is None
            assert not seen.incomplete
    assert found == [0, *(4 * n for n in range(11)), 40, 40, 36]


def test_samples_of_one_prompt(target: Path, make: Make) -> None:
    """Samples of one prompt share its blocks, including draft KV. Each goes on with its own seed."""
    cases = draw_cases(8, seed=9, most_prompt=40)
    seeds = [[sample_seed(c.params.seed or 0, i) for i in range(3)] for c in cases]
    single = [
        Case(c.prompt, dataclasses.replace(c.params, seed=s)) for c, own in zip(cases, seeds, strict=True) for s in own
    ]
    expected = refer(target, make, single)
    with make(max_batch_size=8, **TIGHT) as llm:
        assert_right(llm, expected, [Case(c.prompt, dataclasses.replace(c.params, n=3)) for c in cases])


def test_steps_with_other_draft_lengths(make: Make, reference: Callable[[str], Reference]) -> None:
    """Drafts are right if every step has another K.

    In a step with K = 0, the draft model reads the tokens all the same.
    """
    with make(4, max_batch_size=6, **TIGHT) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: (4, 0, 0, 2, 1)[engine.stats.steps % 5]  # type: ignore[method-assign]
        assert_right(llm, reference("float32"))


@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_is_the_target_gives_k_plus_one_tokens_each_step(target: Path, make: Make, k: int) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=1 + 5 * (k + 1), ignore_eos=True)
    cases = [Case(case.prompt, dataclasses.replace(params, seed=i)) for i, case in enumerate(CASES[:12])]
    with make(k, fields={"model": str(target)}, max_batch_size=4, max_num_tokens=32) as llm:
        run, _ = run_watched(llm, cases)
    verified = [e for step in run.steps for e in step if e.draft_len == k]
    assert len(verified) >= 4 * len(cases)
    assert all(len(e.tokens) == k + 1 for e in verified)


def test_a_draft_of_another_dtype_and_shape(tmp_path: Path) -> None:
    """A draft of another dtype and shape computes in the target's dtype, with its own sizes."""
    target = make_target(tmp_path)
    draft = make_target(tmp_path, name="small", dtype="bfloat16", num_hidden_layers=3, hidden_size=48, seed=4)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K, "one_engine": True}
    cases = [Case(case.prompt, dataclasses.replace(case.params, stop=())) for case in CASES]  # no tokenizer here
    with LLM(target, **ROOMY) as llm:
        expected = run_alone(llm.engine, cases)
    with LLM(target, speculation, max_batch_size=8, **TIGHT) as llm:
        step: Any = llm.engine.loop.target
        step = step.inner.step
        assert isinstance(step, OneEngineStep)
        assert isinstance(step.worker, DraftModelWorker)
        assert isinstance(step.worker.head, DecoderHead)
        assert step.worker.head.decoder.norm.weight.dtype == step.decoder.norm.weight.dtype
        assert len(step.kv_layers) == 5
        run, _ = run_watched(llm, cases)
    assert run.outcomes == expected
    assert 0 < run.speculation.acceptance_per_position[0] < 1


def test_sliding_windows_are_each_models_own(tmp_path: Path) -> None:
    """Target and draft each use their own sliding window.

    The draft's layers come after the target's, in windows as in KV.
    """
    target = make_target(tmp_path, "mistral_swa", max_position_embeddings=512)
    draft = perturbed(target, noise=0.1)
    edit_config(draft, sliding_window=7)
    cases = [Case((case.prompt * 60)[:60], dataclasses.replace(case.params, stop=())) for case in CASES[:6]]

    def make(k: int, dtype: str, fields: dict[str, Any], **options: Any) -> LLM:
        speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k, **fields}
        return LLM(target, speculation, dtype=dtype, **options)

    expected = refer(target, make, cases)
    with make(MOST_K, "float32", {"one_engine": True}, max_batch_size=4, max_num_tokens=40, **ROOMY) as llm:
        assert_right(llm, expected)


@pytest.mark.parametrize(
    ("uniform", "functional"),
    [
        pytest.param(True, False, id="uniform-mutating"),
        pytest.param(False, True, id="ragged-functional", marks=pytest.mark.long),
    ],
)
def test_the_graph_is_the_step(make: Make, uniform: bool, functional: bool) -> None:
    recorder = record(lambda **limits: make(**limits), "sampled")
    step = recorder.inner.step
    assert isinstance(step, OneEngineStep)
    assert_graph_is_step(OneEngineStep(step.decoder, step.worker, functional), recorder, uniform, functional)
