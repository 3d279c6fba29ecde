"""EAGLE3 inside the target's graph: speculation changes no output, and each draft is made of the right draft KV.

The reference for outputs is plain decoding of each request alone. The reference for drafts is an engine that prefills
each prompt at once and never uses a draft (head_cases.log_plainly). Both match bit for bit, with every optimisation of
the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config
from tests.e2e import eagle3_cases
from tests.e2e.eagle3_cases import (
    CAPTURE,
    CASES,
    DRAFT_IDS,
    DTYPES,
    MOST_K,
    ROOMY,
    TIGHT,
    HandsOn,
    K,
    LaunchFails,
    Make,
    Reference,
    assert_lossless,
    first_difference,
)
from tests.e2e.head_cases import Watch, chunks_of, first_wrong_draft, run_watched, step_of, watch
from tests.e2e.tiny import Outcome, Run, assert_all_blocks_free, run_together
from tests.head_checkpoints import make_eagle3
from trtspec.engine.request import Request
from trtspec.engine.step import Emission

folder = eagle3_cases.folder
make = eagle3_cases.make
reference = eagle3_cases.reference


# -- every K -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32"), (5, "bfloat16"), (7, "float32")]
)
def test_every_draft_length(make: Make, reference: Callable[[str], Reference], k: int, dtype: str) -> None:
    """Every draft length works in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position, and requests end inside a draft.
    """
    expected = reference(dtype)
    with make(k, dtype, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        run = assert_lossless(llm, watch(llm, expected.answers, lie=0.3), expected)
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_own_drafts(make: Make, reference: Callable[[str], Reference], dtype: str) -> None:
    """The head's own drafts are right now and then in so small a vocabulary.

    They are sampled with the target's noise, from a vocabulary of the head's own.
    """
    with make(K, dtype, max_batch_size=8, **TIGHT) as llm:
        run = assert_lossless(llm, watch(llm), reference(dtype))
        assert 0 < run.speculation.acceptance_per_position[0] < 1
        assert llm.engine.stats.preemptions > 0


# -- chunks and blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17])
def test_chunk_sizes(make: Make, reference: Callable[[str], Reference], rows: int) -> None:
    """Chunks end before, at and after the ends of blocks.

    The token after a chunk is the prompt's.
    """
    dtype = DTYPES[rows % 2]
    with make(K, dtype, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        expected = reference(dtype)
        run = assert_lossless(llm, watch(llm, expected.answers if rows % 3 else None), expected, count=12)
        assert most() == rows
        assert run.num_mixed_steps > 0


@pytest.mark.parametrize("size", [1, 3, 16])
def test_other_block_sizes(make: Make, reference: Callable[[str], Reference], size: int) -> None:
    expected = reference("float32")
    limits = {**TIGHT, "block_size": size, "num_kv_blocks": 1 + 96 // size}
    with make(K, max_batch_size=8, **limits) as llm:
        assert_lossless(llm, watch(llm, expected.answers), expected)
        assert llm.engine.stats.preemptions > 0


# -- K from step to step -------------------------------------------------------------------------------------------


def lengths_of(run: Run) -> dict[Request, set[int]]:
    """The draft lengths that each request ever had verified."""
    used: dict[Request, set[int]] = {}
    for emission in (e for step in run.steps for e in step if not e.is_context):
        used.setdefault(emission.request, set()).add(emission.draft_len)
    return used


SWITCHES: dict[str, dict[str, Any]] = {
    "schedule": {"draft_len_schedule": {2: 4, 4: 2, 5: 1}},  # 6: none
    "ranges": {"num_speculative_tokens_per_batch_size": [(1, 2, 4), (3, 4, 2), (5, 5, 1), (6, 8, 0)]},
}


@pytest.mark.parametrize(("name", "dtype"), [("schedule", "float32"), ("ranges", "bfloat16")])
def test_draft_length_by_batch_size(make: Make, reference: Callable[[str], Reference], name: str, dtype: str) -> None:
    """Requests join and leave, so that K goes up, down, to 0 and back while others are in the middle."""
    expected = reference(dtype)
    with make(4, dtype, SWITCHES[name], max_batch_size=6, **{**TIGHT, "num_kv_blocks": 60}) as llm:
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
        assert set().union(*lengths_of(run).values()) >= {0, 1, 2, 4}
        assert any(len(lengths) > 2 for lengths in lengths_of(run).values())  # in the middle of a request


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_length_4_0_2_1(make: Make, reference: Callable[[str], Reference], dtype: str) -> None:
    """Every step has another K, for every request. After steps without drafts, draft KV has no gap."""
    expected = reference(dtype)
    with make(4, dtype, max_batch_size=6, **TIGHT) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: (4, 0, 2, 1)[engine.stats.steps % 4]  # type: ignore[method-assign]
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
        assert any(lengths == {0, 1, 2, 4} for lengths in lengths_of(run).values())


def test_a_long_gap_without_drafts(make: Make, reference: Callable[[str], Reference]) -> None:
    """The draft layers run in every step of a long gap without drafts."""
    expected = reference("float32")
    with make(K, max_batch_size=6, **ROOMY) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: K if engine.stats.steps % 9 == 8 else 0  # type: ignore[method-assign]
        assert_lossless(llm, watch(llm), expected)


# -- how far drafts get --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7])
def test_a_head_that_is_always_right_gives_k_plus_one_tokens_each_step(
    make: Make, reference: Callable[[str], Reference], k: int
) -> None:
    expected = reference("float32")
    with make(k, max_batch_size=4, **{**TIGHT, "num_kv_blocks": 512}) as llm:
        watch(llm, expected.answers, lie=0.0)
        run = run_together(llm.engine, CASES)
    assert first_difference(run.outcomes, expected.outcomes) is None
    last = {e.request: e for step in run.steps for e in step}
    verified = [e for step in run.steps for e in step if e.draft_len and e is not last[e.request]]
    assert len(verified) > 10
    assert all(len(e.tokens) == e.draft_len + 1 for e in verified)
    assert sum(e.draft_len == k for e in verified) > len(verified) / 2  # fewer only at the end of a request


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("stop token", "float32"), ("stop string", "bfloat16"), ("end of sequence", "float32"), ("length", "bfloat16")],
)
def test_every_kind_of_end_falls_inside_a_draft(
    make: Make, reference: Callable[[str], Reference], dtype: str, kind: str
) -> None:
    """Every kind of end falls inside a draft.

    The head never lies, so nearly every step is accepted whole, and ends fall after the first accepted draft.
    """
    reason = {"stop token": int, "stop string": str}.get(kind, type(None))
    expected = reference(dtype)
    chosen = [
        i
        for i, outcome in enumerate(expected.outcomes)
        if (outcome.finish_reason == "length") == (kind == "length") and type(outcome.stop_reason) is reason
    ]
    with make(MOST_K, dtype, max_batch_size=4, **TIGHT) as llm:
        watch(llm, [expected.answers[i] for i in chosen], lie=0.0)
        run = run_together(llm.engine, [CASES[i] for i in chosen])
    assert run.cut_inside_draft() or kind == "length"  # drafts are never longer than the remaining length
    assert first_difference(run.outcomes, [expected.outcomes[i] for i in chosen]) is None


SHORT = 29


@pytest.mark.parametrize("whose", ["user", "head"])
def test_drafting_stops_where_its_context_ends(
    target: Path, make: Make, reference: Callable[[str], Reference], tmp_path: Path, whose: str
) -> None:
    """Drafting stops at max_model_len, or at the head's own max_position_embeddings, if it is below the target's."""
    expected = reference("float32")
    fields: dict[str, Any] = {"max_model_len": SHORT}
    if whose == "head":
        fields = {"model": str(make_eagle3(tmp_path, target, CAPTURE, DRAFT_IDS))}
        edit_config(tmp_path / "eagle3", max_position_embeddings=SHORT)
    with make(K, "float32", fields, max_batch_size=8, **TIGHT) as llm:
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
    known = {request: request.prompt_len for request in run.requests}
    lengths = []  # lengths of the sequences that drafts were made for
    for emission in (e for step in run.steps for e in step):
        lengths += [known[emission.request]] * (emission.draft_len > 0)
        known[emission.request] += len(emission.tokens)
    assert max(known.values()) > SHORT + K
    assert max(lengths) == SHORT - K


# -- outputs that the next step reads ------------------------------------------------------------------------------


def test_what_a_step_hands_on_is_what_the_next_one_reads(make: Make, reference: Callable[[str], Reference]) -> None:
    expected = reference("float32")
    with make(K, max_batch_size=6, **{**TIGHT, "num_kv_blocks": 512}) as llm:
        watch(llm, expected.answers)
        loop = llm.engine.loop
        checker = HandsOn(loop.target)
        llm.engine.loop = dataclasses.replace(loop, target=checker)
        run = run_together(llm.engine, CASES)
    assert first_difference(run.outcomes, expected.outcomes) is None
    assert checker.checked > 200


# -- failures ------------------------------------------------------------------------------------------------------


def test_draft_kv_with_a_gap_is_not_used(make: Make, reference: Callable[[str], Reference]) -> None:
    """A request whose draft KV has a gap gets no drafts, which is counted, and the same output.

    The gap is as if draft layers had missed a step. After preemption its tokens are prefilled again, and it speculates
    again.
    """
    expected = reference("float32")
    case, outcome = max(zip(CASES, expected.outcomes, strict=True), key=lambda pair: len(pair[1].token_ids))
    with make(K, max_batch_size=8, enable_prefix_caching=False, **ROOMY) as llm:
        engine = llm.engine
        watch(llm, [case.prompt + outcome.token_ids] * 2, lie=0.9)
        (broken,), (other,) = (engine.add_request(case.prompt, case.params) for _ in range(2))
        for _ in range(3):
            engine.step()
        engine.settle()
        assert broken.drafts
        broken.kv.draft_kv_len, broken.drafts = 0, []
        for _ in range(4):
            engine.step()
            assert broken.kv.draft_kv_len == 0
            assert not broken.drafts
            assert other.drafts
        assert engine.stats.stale_drafts == 4
        engine.settle()
        engine.loop.scheduler._preempt(broken)
        engine.step()
        assert broken.drafts
        assert broken.kv.draft_kv_len == broken.kv.committed
        while engine.has_work:
            engine.step()
        assert engine.stats.stale_drafts == 4
        assert [Outcome.of(broken), Outcome.of(other)] == [outcome] * 2


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_bisected_launch_drafts_the_same(make: Make, reference: Callable[[str], Reference], after: bool) -> None:
    """Requests that fail a launch do not change the drafts of others, whose launch is repeated in parts."""
    expected = reference("float32")
    doomed = {i: len(CASES[i].prompt) + 2 for i in range(0, len(CASES), 4) if len(expected.outcomes[i].token_ids) > 4}
    with make(K, max_batch_size=8, **TIGHT) as llm:
        head, loop = watch(llm, expected.answers), llm.engine.loop
        failing = LaunchFails(loop.target, doomed, after)
        llm.engine.loop = dataclasses.replace(loop, target=failing)
        run, seen = run_watched(llm, CASES)
        assert {r.request_id for r in run.requests if r.finish_reason == "error"} == set(doomed)
        kept = [i for i in range(len(CASES)) if i not in doomed]
        assert first_difference([run.outcomes[i] for i in kept], [expected.outcomes[i] for i in kept]) is None
        assert first_wrong_draft(head, seen, expected.told) is None
        assert failing.failures > 2 * len(doomed) > 6  # first with others, then alone
        assert_all_blocks_free(llm)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.attention.qkv.weight", "norm.weight"])
def test_a_head_full_of_nan_changes_no_output(make: Make, reference: Callable[[str], Reference], name: str) -> None:
    """A head full of NaN still drafts ids. They are rejected unless they happen to be right."""
    expected = reference("float32")
    with make(K, max_batch_size=8, **TIGHT) as llm:
        worker = step_of(llm).worker
        with torch.no_grad():
            worker.get_parameter(f"head.{name}").fill_(float("nan"))
        run = run_together(llm.engine, CASES[:16])
        assert first_difference(run.outcomes, expected.outcomes[:16]) is None
        assert_all_blocks_free(llm)


def test_aborts_harm_nobody(make: Make, reference: Callable[[str], Reference]) -> None:
    """Every third request is aborted in the middle. The others get right drafts and right tokens."""
    expected = reference("float32")
    with make(K, max_batch_size=8, **TIGHT) as llm:
        head = watch(llm, expected.answers)
        engine, seen = llm.engine, Watch(llm)
        doomed = range(0, len(CASES), 3)

        def after_step(emissions: list[Emission]) -> None:
            seen(emissions)
            for emission in emissions:
                if emission.request.request_id in doomed and emission.tokens and not emission.request.finished:
                    engine.abort(emission.request.request_id)

        run = run_together(engine, CASES, after_step=after_step)
        kept = [i for i in range(len(CASES)) if i not in doomed]
        assert first_difference([run.outcomes[i] for i in kept], [expected.outcomes[i] for i in kept]) is None
        assert sum(request.finish_reason == "abort" for request in run.requests) > 5
        assert first_wrong_draft(head, seen, expected.told) is None
        assert_all_blocks_free(llm)
