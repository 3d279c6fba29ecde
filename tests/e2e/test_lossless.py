"""Speculation never changes the output: every mode, in any batch, against plain decoding of each request alone.

The reference runs one request at a time in a large cache, without chunks. The engine under test gets the same requests
a few at a time. Prompts come in chunks, and stops fall inside drafts. The cache is too small for all requests, so they
are preempted and computed again. Ids, text and reasons must be the same, bit for bit, in fp32 and bf16.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import (
    Case,
    LyingOracle,
    Outcome,
    Run,
    assert_all_blocks_free,
    draw_cases,
    make_target,
    perturbed,
    run_alone,
    run_together,
)
from trtspec import LLM
from trtspec.sampling_params import sample_seed

DTYPES = ("float32", "bfloat16")
SLOW: dict[str, Any] = {"float32": (), "bfloat16": pytest.mark.slow}
CASES = draw_cases(80, seed=14)
K = 3
MODES: dict[str, dict[str, Any]] = {
    "ngram-earliest": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "ngram-latest": {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "prompt_lookup_latest": True,
    },
    "ngram-pool": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "is_public_pool": True},
    "suffix": {"method": "suffix"},
    "draft": {"method": "draft_model"},
    "auto": {"method": "auto"},
    "user": {"method": "custom_class"},
}
# 8 requests of up to 104 tokens in 40 blocks of 4, so requests are preempted. 8 * (K + 1) rows a step, so long prompts
# are prefilled in chunks.
TIGHT = {"max_batch_size": 8, "max_num_tokens": 32, "num_kv_blocks": 41, "block_size": 4}


def plain(target: Path, dtype: str, cases: Sequence[Case]) -> list[Outcome]:
    with LLM(target, dtype=dtype, num_kv_blocks=512) as llm:
        return run_alone(llm.engine, cases)


def first_difference(got: Sequence[Outcome], want: Sequence[Outcome]) -> str | None:
    """Describe the first case that differs. None if all are the same."""
    assert len(got) == len(want)
    return next(
        (f"case {i}: {a} instead of {b}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None
    )


@dataclass(frozen=True)
class Scenario:
    """All cases run together in one mode, with their expected outcomes."""

    run: Run
    llm: LLM
    expected: list[Outcome]


@pytest.fixture(scope="module")
def reference(target: Path) -> Callable[[str], list[Outcome]]:
    """dtype -> the outcome of every case, alone and without speculation, computed when first asked for."""
    return functools.cache(lambda dtype: plain(target, dtype, CASES))


@pytest.fixture(
    scope="module",
    params=[pytest.param((mode, dtype), marks=SLOW[dtype], id=f"{mode}-{dtype}") for dtype in DTYPES for mode in MODES],
)
def scenario(
    request: pytest.FixtureRequest, target: Path, draft: Path, reference: Callable[[str], list[Outcome]]
) -> Scenario:
    mode, dtype = request.param
    expected = reference(dtype)
    speculation = {"num_speculative_tokens": K, **MODES[mode]}
    if mode == "draft":
        speculation["model"] = str(draft)
    if mode == "user":
        answers = [c.prompt + o.token_ids for c, o in zip(CASES, expected, strict=True)]
        speculation["drafter"] = LyingOracle(answers, shorten=0.2)
    llm = LLM(target, speculation, dtype=dtype, **TIGHT)
    return Scenario(run_together(llm.engine, CASES), llm, expected)


def test_outcomes_are_those_of_plain_decoding(scenario: Scenario) -> None:
    assert first_difference(scenario.run.outcomes, scenario.expected) is None


def test_some_drafts_were_accepted_and_some_rejected_at_every_position(scenario: Scenario) -> None:
    acceptance = scenario.run.speculation.acceptance_per_position
    assert len(acceptance) == K
    assert all(0 < share < 1 for share in acceptance), acceptance


def test_requests_were_preempted(scenario: Scenario) -> None:
    assert scenario.llm.engine.loop.scheduler.num_preemptions > 0


def test_chunks_of_prompts_ran_next_to_drafts(scenario: Scenario) -> None:
    assert scenario.run.num_mixed_steps > 0


def test_requests_ended_inside_a_draft(scenario: Scenario) -> None:
    assert scenario.run.cut_inside_draft()


def test_every_block_came_back(scenario: Scenario) -> None:
    assert_all_blocks_free(scenario.llm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["stop token", "stop string", "end of sequence"])
def test_every_kind_of_stop_falls_inside_a_draft(
    target: Path, reference: Callable[[str], list[Outcome]], dtype: str, kind: str
) -> None:
    """Every kind of stop falls inside a draft.

    The oracle never lies, so nearly every step is accepted whole, and stops fall after the first accepted draft.
    """
    reason = {"stop token": int, "stop string": str, "end of sequence": type(None)}[kind]
    chosen = [i for i, o in enumerate(reference(dtype)) if o.finish_reason == "stop" and type(o.stop_reason) is reason]
    cases, expected = [CASES[i] for i in chosen], [reference(dtype)[i] for i in chosen]
    oracle = LyingOracle([c.prompt + o.token_ids for c, o in zip(cases, expected, strict=True)], lie=0.0)
    speculation = {"method": "custom_class", "drafter": oracle, "num_speculative_tokens": K}
    with LLM(target, speculation, dtype=dtype, **TIGHT) as llm:
        run = run_together(llm.engine, cases)
    assert run.cut_inside_draft()
    assert first_difference(run.outcomes, expected) is None


ARCHS = (("llama31", "bfloat16"), ("mistral_swa", "bfloat16"), ("qwen3", "float32"), ("llama_dynamic", "float32"))


@pytest.mark.parametrize(("arch", "dtype"), ARCHS)
def test_neighbours_of_very_different_length_do_not_matter(tmp_path: Path, arch: str, dtype: str) -> None:
    """Contexts of 1 to 290 tokens in one batch do not affect each other.

    They fill one or two KV tiles, slide past their windows many times, and stretch rope.
    """
    target = make_target(tmp_path, arch, max_position_embeddings=128 if arch == "llama_dynamic" else 512)
    draft = perturbed(target, noise=0.1)
    cases = draw_cases(16, seed=5, most_tokens=16)
    cases = [Case((c.prompt * 280)[: 240 + 3 * i] if i % 4 == 0 else c.prompt, c.params) for i, c in enumerate(cases)]
    cases = [Case(c.prompt, dataclasses.replace(c.params, stop=())) for c in cases]  # no tokenizer here
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with LLM(target, speculation, dtype=dtype, max_batch_size=6, max_num_tokens=100, num_kv_blocks=60) as llm:
        run = run_together(llm.engine, cases)
    assert first_difference(run.outcomes, plain(target, dtype, cases)) is None


def test_samples_of_one_prompt_are_those_of_their_seeds(target: Path, draft: Path) -> None:
    """n samples share prompt blocks and are drafted together. Each is the output of its own seed alone."""
    cases = draw_cases(10, seed=9)
    seeds = [[sample_seed(c.params.seed or 0, i) for i in range(3)] for c in cases]
    single = [
        Case(c.prompt, dataclasses.replace(c.params, seed=s)) for c, own in zip(cases, seeds, strict=True) for s in own
    ]
    together = [Case(c.prompt, dataclasses.replace(c.params, n=3)) for c in cases]
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    with LLM(target, speculation, **TIGHT) as llm:
        run = run_together(llm.engine, together)
    assert first_difference(run.outcomes, plain(target, "auto", single)) is None


DRAFT_CONTEXT = 24


@pytest.fixture(scope="module")
def short_draft_run(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Outcome]]:
    """A run of requests that outgrow the draft's own max_position_embeddings, and their outcomes by plain decoding."""
    draft = perturbed(target, noise=0.1, folder=tmp_path_factory.mktemp("short"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": DRAFT_CONTEXT}))
    cases = [Case(c.prompt[:20], dataclasses.replace(c.params, ignore_eos=True)) for c in CASES[:24]]
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    with LLM(target, speculation, **TIGHT) as llm:
        return run_together(llm.engine, cases), plain(target, "auto", cases)


def test_a_draft_with_a_shorter_context_changes_no_output(short_draft_run: tuple[Run, list[Outcome]]) -> None:
    run, expected = short_draft_run
    assert max(len(request.tokens) for request in run.requests) > DRAFT_CONTEXT + K
    assert first_difference(run.outcomes, expected) is None


def test_a_draft_with_a_shorter_context_drafts_exactly_as_far_as_it_reaches(
    short_draft_run: tuple[Run, list[Outcome]],
) -> None:
    run, _ = short_draft_run
    known = {request: request.prompt_len for request in run.requests}
    lengths = []  # lengths of the sequences that drafts were made for
    for emission in (e for step in run.steps for e in step):
        lengths += [known[emission.request]] * (emission.draft_len > 0)
        known[emission.request] += len(emission.tokens)
    assert max(lengths) == DRAFT_CONTEXT - K
