"""EAGLE3 inside the target's graph: speculation changes no output, and each draft is made of the right draft KV.

The reference for outputs is plain decoding of each request alone; that for drafts an engine that reads each prompt at
once and never uses a draft (heads.log_plainly). Both are met bit for bit under all that an engine does to save work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config, make_eagle3
from tests.e2e.heads import (
    Made,
    Place,
    Watch,
    WatchedHead,
    chunks_of,
    first_wrong_draft,
    log_plainly,
    run_watched,
    step_of,
    watch,
)
from tests.e2e.tiny import (
    Case,
    Outcome,
    Run,
    assert_all_blocks_free,
    draw_cases,
    run_alone,
    run_together,
)
from trtspec import LLM, SamplingParams
from trtspec.core import StepInputs, StepOutputs
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.protocols import Executable
from trtspec.sampling_params import sample_seed

DTYPES = ("float32", "bfloat16")
K = 3
MOST_K = 7
CAPTURE = (0, 1)
DRAFT_IDS = (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8)
CASES = draw_cases(30, seed=27, most_prompt=60)
ROOMY: dict[str, Any] = {"num_kv_blocks": 1000, "block_size": 4}
PLAIN: dict[str, Any] = {**ROOMY, "max_batch_size": 64, "enable_prefix_caching": False}
# Up to 84 tokens a request in 24 blocks of 4: preemption. No more rows a step than 32: long prompts come in chunks.
TIGHT: dict[str, Any] = {"max_num_tokens": 32, "num_kv_blocks": 25, "block_size": 4}


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the target, of 11 of its 16 ids."""
    return make_eagle3(tmp_path_factory.mktemp("eagle3"), target, CAPTURE, DRAFT_IDS)


Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(target: Path, folder: Path) -> Make:
    """(K, dtype, fields of the speculation, engine options) -> LLM."""

    def make(k: int = K, dtype: str = "float32", fields: dict[str, Any] | None = None, **options: Any) -> LLM:
        speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k, **(fields or {})}
        return LLM(target, speculation, dtype=dtype, **options)

    return make


@dataclasses.dataclass(frozen=True)
class Reference:
    """What must come out of CASES, and what drafts must be made of."""

    outcomes: list[Outcome]
    answers: list[list[int]]
    told: dict[Place, Made]  # by a head that knows the answers and lies
    own: dict[Place, Made]  # by the head itself


def plain(target: Path, cases: Sequence[Case], dtype: str = "float32") -> tuple[list[Outcome], list[list[int]]]:
    """Outcomes of each case alone without speculation; prompts and outputs."""
    with LLM(target, dtype=dtype, enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = run_alone(llm.engine, cases)
    return outcomes, [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[str], Reference]:
    """dtype -> reference of CASES; computed when first asked for."""

    def compute(dtype: str) -> Reference:
        outcomes, answers = plain(target, CASES, dtype)
        logs = []
        for words in (answers, None):
            with make(MOST_K, dtype, **PLAIN) as llm:
                logs.append(log_plainly(llm, watch(llm, words), CASES))
        return Reference(outcomes, answers, *logs)

    return functools.cache(compute)


def first_difference(got: Sequence[Outcome], want: Sequence[Outcome]) -> str | None:
    assert len(got) == len(want)
    return next(
        (f"case {i}: {a} instead of {b}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None
    )


def assert_lossless(llm: LLM, head: WatchedHead, expected: Reference, count: int = len(CASES)) -> Run:
    """The first `count` cases together: outputs, what drafts are made of, draft KV after each step, the blocks."""
    run, seen = run_watched(llm, CASES[:count])
    assert first_difference(run.outcomes, expected.outcomes[:count]) is None
    assert first_wrong_draft(head, seen, expected.own if head.answers is None else expected.told) is None
    assert not seen.incomplete
    assert llm.engine.stats.stale_drafts == 0
    assert_all_blocks_free(llm)
    return run


# -- every K -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_every_draft_length(make: Make, reference: Callable[[str], Reference], k: int, dtype: str) -> None:
    """In a cache too small, prompts in chunks, drafts right and wrong at every place, requests that end inside one."""
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
    """Drawn with the target's noise from a vocabulary of its own; right now and then, in so small a vocabulary."""
    with make(K, dtype, max_batch_size=8, **TIGHT) as llm:
        run = assert_lossless(llm, watch(llm), reference(dtype))
        assert 0 < run.speculation.acceptance_per_position[0] < 1
        assert llm.engine.stats.preemptions > 0


# -- chunks, shared prefixes, samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 18))
def test_every_chunk_size(make: Make, reference: Callable[[str], Reference], rows: int) -> None:
    """Chunks end before, at and behind the ends of blocks; the token after a chunk is the prompt's."""
    dtype = DTYPES[rows % 2]
    with make(K, dtype, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        expected = reference(dtype)
        run = assert_lossless(llm, watch(llm, expected.answers if rows % 3 else None), expected, count=16)
        assert most() == rows
        assert run.num_mixed_steps > 0


@pytest.mark.parametrize("size", [1, 3, 16])
def test_other_block_sizes(make: Make, reference: Callable[[str], Reference], size: int) -> None:
    expected = reference("float32")
    limits = {**TIGHT, "block_size": size, "num_kv_blocks": 1 + 96 // size}
    with make(K, max_batch_size=8, **limits) as llm:
        assert_lossless(llm, watch(llm, expected.answers), expected)
        assert llm.engine.stats.preemptions > 0


BASE = [1 + i * i % 14 for i in range(42)]
SHARED = 10  # blocks of BASE, of 4


@pytest.mark.parametrize(("dtype", "told"), [("float32", False), ("bfloat16", True)])
def test_prefix_hits_of_every_block_count(target: Path, make: Make, dtype: str, told: bool) -> None:
    """Draft KV of a position depends on the token after it, so the last block shared is computed again: what it holds
    for its last row belongs to the other text."""
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
    """Each prompt is all that was said before, and a little more: blocks that generation filled are found."""
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
    """They share the blocks of the prompt, draft KV and all, and go on each with its own seed."""
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


# -- K from step to step -------------------------------------------------------------------------------------------


def lengths_of(run: Run) -> dict[Request, set[int]]:
    """How many drafts each request had verified at once, ever."""
    used: dict[Request, set[int]] = {}
    for emission in (e for step in run.steps for e in step if not e.is_context):
        used.setdefault(emission.request, set()).add(emission.draft_len)
    return used


SWITCHES: dict[str, dict[str, Any]] = {
    "schedule": {"draft_len_schedule": {2: 4, 4: 2, 5: 1}},  # 6: none
    "ranges": {"num_speculative_tokens_per_batch_size": [(1, 2, 4), (3, 4, 2), (5, 5, 1), (6, 8, 0)]},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SWITCHES)
def test_draft_length_by_batch_size(make: Make, reference: Callable[[str], Reference], name: str, dtype: str) -> None:
    """Requests join and leave, so that K goes up, down, to 0 and back while others are in the middle."""
    expected = reference(dtype)
    with make(4, dtype, SWITCHES[name], max_batch_size=6, **{**TIGHT, "num_kv_blocks": 60}) as llm:
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
        assert set().union(*lengths_of(run).values()) >= {0, 1, 2, 4}
        assert any(len(lengths) > 2 for lengths in lengths_of(run).values())  # in the middle of a request


@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_length_4_0_2_1(make: Make, reference: Callable[[str], Reference], dtype: str) -> None:
    """Every step another K, for every request. Draft KV has no gap after the steps without drafts."""
    expected = reference(dtype)
    with make(4, dtype, max_batch_size=6, **TIGHT) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: (4, 0, 2, 1)[engine.stats.steps % 4]  # type: ignore[method-assign]
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
        assert any(lengths == {0, 1, 2, 4} for lengths in lengths_of(run).values())


def test_a_long_gap_without_drafts(make: Make, reference: Callable[[str], Reference]) -> None:
    """The draft layers ran in every one of those steps."""
    expected = reference("float32")
    with make(K, max_batch_size=6, **ROOMY) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: K if engine.stats.steps % 9 == 8 else 0  # type: ignore[method-assign]
        assert_lossless(llm, watch(llm), expected)


# -- how far drafts get --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 7])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["stop token", "stop string", "end of sequence", "length"])
def test_every_kind_of_end_falls_inside_a_draft(
    make: Make, reference: Callable[[str], Reference], dtype: str, kind: str
) -> None:
    """With a head that never lies nearly every step is accepted whole, so ends fall behind the first accepted draft."""
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
    assert run.cut_inside_draft() or kind == "length"  # drafts are never longer than what is still wanted
    assert first_difference(run.outcomes, [expected.outcomes[i] for i in chosen]) is None


SHORT = 29


@pytest.mark.parametrize("whose", ["user", "head"])
def test_drafting_stops_where_its_context_ends(
    target: Path, make: Make, reference: Callable[[str], Reference], tmp_path: Path, whose: str
) -> None:
    """max_model_len, or the head's own max_position_embeddings, below the target's."""
    expected = reference("float32")
    fields: dict[str, Any] = {"max_model_len": SHORT}
    if whose == "head":
        fields = {"model": str(make_eagle3(tmp_path, target, CAPTURE, DRAFT_IDS))}
        edit_config(tmp_path / "eagle3", max_position_embeddings=SHORT)
    with make(K, "float32", fields, max_batch_size=8, **TIGHT) as llm:
        run = assert_lossless(llm, watch(llm, expected.answers), expected)
    known = {request: request.prompt_len for request in run.requests}
    lengths = []  # of the sequences that drafts were made for
    for emission in (e for step in run.steps for e in step):
        lengths += [known[emission.request]] * (emission.draft_len > 0)
        known[emission.request] += len(emission.tokens)
    assert max(known.values()) > SHORT + K
    assert max(lengths) == SHORT - K


def test_forced_acceptance(make: Make) -> None:
    """2 drafts a step count as right whatever they are; the first token of a prompt is not forced."""
    case = Case(BASE, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    with make(K, force_num_accepted_tokens=2, **ROOMY) as llm:
        run = run_together(llm.engine, [case])
    assert [len(e.tokens) for step in run.steps for e in step] == [1, 3, 3, 3, 3, 3, 3, 3, 2]


# -- what the graph hands on ---------------------------------------------------------------------------------------


class HandsOn:
    """The target, checking that what a step hands on is what the engine then reads in: that is what lets the next step
    start before the host has seen this one."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.checked = 0
        self.handed: dict[int, tuple[list[int], int]] = {}  # request id -> next_new_tokens, next_kv_lens

    def run(self, inputs: StepInputs) -> StepOutputs:
        starts, spec = inputs.attn.cu_q_lens.tolist(), inputs.spec
        for b, request in enumerate(spec.request_ids):
            before = int(inputs.attn.kv_lens[b] - spec.seq_lens[b])
            if request in self.handed:
                tokens, kv_len = self.handed[request]
                assert before == kv_len
                if b >= spec.num_contexts:
                    rows = inputs.input_ids[starts[b] : starts[b + 1]].tolist()
                    assert rows == tokens[: len(rows)]
                    self.checked += len(rows)
        outputs = self.inner.run(inputs)
        assert outputs.next_new_tokens is not None
        assert outputs.next_kv_lens is not None
        self.handed = dict(
            zip(
                spec.request_ids,
                zip(outputs.next_new_tokens.tolist(), outputs.next_kv_lens.tolist(), strict=True),
                strict=True,
            )
        )
        return outputs


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


# -- when something goes wrong -------------------------------------------------------------------------------------


def test_draft_kv_with_a_gap_is_not_used(make: Make, reference: Callable[[str], Reference]) -> None:
    """As if draft layers had missed a step: no drafts for that request, which counts; outputs are the same. Read in
    again after it was preempted, it speculates again."""
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
        broken.kv.draft_len, broken.drafts = 0, []
        for _ in range(4):
            engine.step()
            assert broken.kv.draft_len == 0
            assert not broken.drafts
            assert other.drafts
        assert engine.stats.stale_drafts == 4
        engine.settle()
        engine.loop.scheduler._preempt(broken)
        engine.step()
        assert broken.drafts
        assert broken.kv.draft_len == broken.kv.committed
        while engine.has_work:
            engine.step()
        assert engine.stats.stale_drafts == 4
        assert [Outcome.of(broken), Outcome.of(other)] == [outcome] * 2


class LaunchFails:
    """The target, failing whenever a doomed request has reached its length: before it has run, or after it has written
    KV."""

    def __init__(self, inner: Executable, doomed: dict[int, int], after: bool) -> None:
        self.inner = inner
        self.doomed = doomed
        self.after = after
        self.failures = 0

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self.after:
            outputs = self.inner.run(inputs)
        lengths = zip(inputs.spec.request_ids, inputs.attn.kv_lens.tolist(), strict=True)
        if any(length >= self.doomed.get(request, 10**6) for request, length in lengths):
            self.failures += 1
            raise RuntimeError("doomed")
        return outputs if self.after else self.inner.run(inputs)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_bisected_launch_drafts_the_same(make: Make, reference: Callable[[str], Reference], after: bool) -> None:
    """Some break the launch in the middle of others' lives: those are launched again in parts, drafts and all."""
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
        assert failing.failures > 2 * len(doomed) > 6  # in company first, then alone
        assert_all_blocks_free(llm)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.attention.qkv.weight", "norm.weight"])
def test_a_head_full_of_nan_changes_no_output(make: Make, reference: Callable[[str], Reference], name: str) -> None:
    """Whatever it drafts is an id, and is rejected unless it happens to be right."""
    expected = reference("float32")
    with make(K, max_batch_size=8, **TIGHT) as llm:
        worker = step_of(llm).worker
        with torch.no_grad():
            worker.get_parameter(f"head.{name}").fill_(float("nan"))
        run = run_together(llm.engine, CASES[:16])
        assert first_difference(run.outcomes, expected.outcomes[:16]) is None
        assert_all_blocks_free(llm)


def test_aborts_harm_nobody(make: Make, reference: Callable[[str], Reference]) -> None:
    """Every third request goes away in the middle; those that stay are given right drafts and right tokens."""
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
