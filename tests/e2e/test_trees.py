"""Draft trees: with static trees the tokens equal plain decoding's, at any temperature."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.async_stand_in import HostQueue
from tests.contract.trees import DEPTH, NODES, TREE
from tests.e2e.conformance import LIMITS, assert_as_planned, make_models
from tests.e2e.head_cases import step_of
from tests.e2e.tiny import (
    Case,
    Outcome,
    assert_all_blocks_free,
    draw_cases,
    run_alone,
    run_together,
    with_constraints,
)
from tests.head_checkpoints import make_medusa
from trtspec import LLM, SamplingParams
from trtspec.backends.table import BACKENDS
from trtspec.build.build import build_engine
from trtspec.build.context import plan_context
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.core import Proposal, SamplingTensors
from trtspec.engine.overlap import OverlapLoop
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.worker import SpecWorker

DRAWN = draw_cases(32, seed=52)
# Four prompts at the end are long, so that requests are preempted and prompts come in chunks.
CASES = [*DRAWN[:28], *(replace(case, prompt=(case.prompt * 80)[:80]) for case in DRAWN[28:])]
MODES: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "head"},
    "eagle": {"method": "eagle", "model": "eagle"},
    "medusa": {"method": "medusa", "model": "medusa"},
}
SIZES = {**LIMITS, "max_num_tokens": 8 * (NODES + 1), "num_kv_blocks": 33}  # so few that requests are preempted


class TellingWorker(SpecWorker):
    """A worker that often knows the right token, which it puts among the children of a node at any rank.

    Whether and where depends on request and position alone. answers: prompt and output of each request.
    """

    def __init__(self, inner: SpecWorker, answers: Sequence[Sequence[int]]) -> None:
        super(torch.nn.Module, self).__init__()
        self.__dict__ |= inner.__dict__
        self.answers = answers
        self._ids: tuple[int, ...] = ()

    def draft(self, *arguments: Any) -> Proposal:
        self._ids = arguments[4].request_ids
        return super().draft(*arguments)

    def sample_children(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, count: int
    ) -> tuple[Tensor, Tensor | None]:
        found, scores = super().sample_children(step, hidden, sampling, count)
        each = len(found) // len(self._ids)
        for r, place in enumerate(sampling.positions.tolist()):
            request = self._ids[r // each]
            rank = random.Random(f"{request} {place}").randrange(count + 1)
            if rank < count and place < len(self.answers[request]):
                right = self.answers[request][place]
                found[r][found[r] == right] = found[r, rank]
                found[r, rank] = right
        return found, scores


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_models(tmp_path_factory.mktemp("trees"))
    make_medusa(folder, folder / "target", num_heads=3)
    return folder


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    with LLM(models / "target", **LIMITS) as llm:
        return run_alone(llm.engine, CASES)


def speculation(mode: str, models: Path, tree: str = TREE) -> dict[str, Any]:
    return {**MODES[mode], "model": str(models / MODES[mode]["model"]), "speculative_token_tree": tree}


def tell(llm: LLM, cases: Sequence[Case], outcomes: Sequence[Outcome]) -> None:
    """Give the engine's worker the right answers."""
    step: Any = step_of(llm)
    step.worker = TellingWorker(step.worker, [[*c.prompt, *o.token_ids] for c, o in zip(cases, outcomes, strict=True)])


# --- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_plain_decoding(mode: str, models: Path, plain: list[Outcome]) -> None:
    with LLM(models / "target", speculative_config=speculation(mode, models), **SIZES) as llm:
        tell(llm, CASES, plain)
        run = run_together(llm.engine, CASES)
        assert run.outcomes == plain
        counts = {num_tokens for num_tokens, draft_len in run.speculation.outcomes if draft_len}
        assert counts == {1, 2, 3, 4}, "drafts of every depth are accepted now and then"
        assert {draft_len for _, draft_len in run.speculation.outcomes} >= {0, 3, 6, 10}, "limits cut whole depths"
        assert llm.engine.loop.scheduler.num_preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()
        kept = [e for step in run.steps for e in step if e.num_drafts]
        assert all(list(e.drafts[: e.num_drafts]) == e.tokens[: e.num_drafts] for e in kept)
        assert_all_blocks_free(llm)


# --- other backends ---------------------------------------------------------------------------------------------------


def check_compiled(wishes: dict[str, Any], models: Path, plain: list[Outcome], folder: Path, blocks: int = 33) -> None:
    limits = {name: size for name, size in SIZES.items() if name != "num_kv_blocks"}
    config = EngineConfig(backend="aoti", dtype="float32", **limits)
    wanted = read_speculative_config(wishes)
    build_engine(models / "target", folder, wanted, config)
    assert_as_planned(plan_build(models / "target", wanted, config), folder)
    with LLM(folder, num_kv_blocks=blocks) as llm:
        check_drafts_change_nothing(llm, plain)


def check_drafts_change_nothing(llm: LLM, plain: list[Outcome]) -> None:
    run = run_together(llm.engine, CASES)
    assert run.outcomes == plain
    assert run.speculation.num_accepted_tokens > len(CASES), "untrained heads are right now and then"
    assert {draft_len for _, draft_len in run.speculation.outcomes} >= {0, 3, 6, 10}, "limits cut whole depths"
    assert llm.engine.loop.scheduler.num_preemptions > 0
    assert run.num_mixed_steps > 0
    assert_all_blocks_free(llm)


# --- draft layers next to the target ----------------------------------------------------------------------------------

FEWER_BLOCKS = 29
TWO_ENGINES = {
    "eagle3": {"method": "eagle3", "model": "head", "one_engine": False},
    "draft_model": {"method": "draft_model", "model": "draft"},
}


def two_engines(mode: str, models: Path) -> dict[str, Any]:
    return {**TWO_ENGINES[mode], "model": str(models / TWO_ENGINES[mode]["model"]), "speculative_token_tree": TREE}


@pytest.mark.parametrize("mode", TWO_ENGINES)
def test_drafts_are_those_of_one_engine(mode: str, models: Path, plain: list[Outcome]) -> None:
    """In a cache with room, both offer the same trees, and so accept the same paths in the same steps."""
    sizes, steps = {**SIZES, "num_kv_blocks": 400}, []
    for inside in (False, True):
        wishes = {**two_engines(mode, models), "one_engine": inside}
        with LLM(models / "target", speculative_config=wishes, **sizes) as llm:
            assert len(llm.engine.executables) == 2 - inside
            run = run_together(llm.engine, CASES)
        assert run.outcomes == plain
        steps.append([(e.tokens, sorted(e.drafts)) for step in run.steps for e in step if e.tokens])
    assert steps[0] == steps[1]
    assert any(len(tokens) > 2 for tokens, _ in steps[0])


@pytest.mark.parametrize("mode", TWO_ENGINES)
def test_two_engines_on_a_gpu(mode: str, models: Path, plain: list[Outcome], work: HostQueue) -> None:
    settings = {**SIZES, "num_kv_blocks": FEWER_BLOCKS, "backend": "cuda", "debug": True}
    with LLM(models / "target", speculative_config=two_engines(mode, models), **settings) as llm:
        check_drafts_change_nothing(llm, plain)


@pytest.mark.long
@pytest.mark.parametrize("mode", TWO_ENGINES)
def test_two_compiled_engines(mode: str, models: Path, plain: list[Outcome], tmp_path: Path) -> None:
    check_compiled(two_engines(mode, models), models, plain, tmp_path / "engine", FEWER_BLOCKS)


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "mode", ["eagle3", *(pytest.param(one, marks=pytest.mark.long) for one in ("eagle", "medusa"))]
)
def test_tokens_on_a_gpu(mode: str, waits: bool, models: Path, plain: list[Outcome], work: HostQueue) -> None:
    """On the stand-in for a GPU, with CUDA graphs: steps are launched before the path of the last one is known."""
    settings = {**SIZES, "backend": "cuda", "debug": True, "disable_overlap_scheduler": waits}
    with LLM(models / "target", speculative_config=speculation(mode, models), **settings) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop) != waits
        check_drafts_change_nothing(llm, plain)
        assert work.num_replayed > 10


def test_a_sequence_of_full_length_on_a_gpu(models: Path, work: HostQueue) -> None:
    """Block tables are wide enough for branches past the length limit."""
    sizes = {"max_batch_size": 2, "max_seq_len": 64, "block_size": 1, "max_num_tokens": 64}
    cases = [Case([3 + i % 9 for i in range(20)], SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True))]
    with LLM(models / "target", **sizes) as llm:
        plain = run_alone(llm.engine, cases)
    wanted = speculation("eagle3", models)
    with LLM(models / "target", speculative_config=wanted, backend="cuda", debug=True, **sizes) as llm:
        assert llm.engine.executables[0].inner._limits.max_columns >= 64 + NODES  # type: ignore[attr-defined]
        run = run_together(llm.engine, cases)
    assert run.outcomes == plain


def test_requests_limit_the_depth_on_a_gpu(models: Path, work: HostQueue) -> None:
    """So do schedules; there are graphs for the number of nodes of each depth that is scheduled."""
    wanted = {**speculation("eagle3", models), "draft_len_schedule": {2: 3, 8: 1}}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(models / "target", **LIMITS) as llm:
        plain = llm.generate([[3, 4, 5 + i] for i in range(5)], params)
    with LLM(models / "target", speculative_config=wanted, backend="cuda", **SIZES) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop)
        limited = replace(params, max_draft_len=2)
        found = [*llm.generate([[3, 4, 5]], limited), *llm.generate([[3, 4, 5 + i] for i in range(5)], params)]
        counts = {count for _, count in llm.engine.stats.speculation.outcomes}
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in (plain[0], *plain)]
    assert counts >= {3, 6}, "3 nodes of depth 1, 6 of depth 2"
    assert 2 not in counts


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_a_compiled_engine(mode: str, models: Path, plain: list[Outcome], tmp_path: Path) -> None:
    check_compiled(speculation(mode, models), models, plain, tmp_path / "engine")


def test_constraints_follow_the_branches(models: Path) -> None:
    """Penalties and logprobs of a node count the drafts before it, and no other."""
    cases = with_constraints(CASES)
    with LLM(models / "target", **LIMITS) as llm:
        plain = run_together(llm.engine, cases)
    with LLM(models / "target", speculative_config=speculation("eagle3", models), **SIZES) as llm:
        tell(llm, cases, plain.outcomes)
        run = run_together(llm.engine, cases)
    assert run.outcomes == plain.outcomes
    assert run.speculation.acceptance_length > 1.5
    for ours, theirs in zip(run.requests, plain.requests, strict=True):
        assert (ours.logprobs and ours.logprobs.entries) == (theirs.logprobs and theirs.logprobs.entries)


def test_a_chain_written_as_a_tree_is_the_chain(models: Path) -> None:
    chain = "[(0,), (0, 0), (0, 0, 0)]"
    with LLM(models / "target", speculative_config=speculation("eagle3", models, chain), **SIZES) as llm:
        assert llm.engine.loop.input_builder.tree is None
        assert llm.engine.loop.input_builder.max_draft_len == DEPTH


def test_a_tree_accepts_at_least_what_its_chain_does(models: Path, plain: list[Outcome]) -> None:
    lengths = []
    for tree in ("[(0,), (0, 0), (0, 0, 0)]", TREE):
        with LLM(models / "target", speculative_config=speculation("eagle3", models, tree), **SIZES) as llm:
            lengths.append(run_together(llm.engine, CASES).speculation.acceptance_length)
    assert lengths[1] > lengths[0] > 1


def test_forced_acceptance_keeps_first_children(models: Path) -> None:
    forced = {**SIZES, "force_num_accepted_tokens": 2}
    with LLM(models / "target", speculative_config=speculation("eagle3", models), **forced) as llm:
        request = llm.engine.add_request([3, 4, 5], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        while llm.engine.has_work:
            emissions = llm.engine.step()
            kept = [e for e in emissions if e.draft_len == NODES and not e.finished]
            assert all(len(e.tokens) == 3 for e in kept)
        assert max(num_tokens for [sample] in [request] for num_tokens, _ in sample.stats.outcomes) == 3


def test_a_gate_may_leave_as_many_nodes_as_the_tree_is_deep(models: Path) -> None:
    """A step of 3 nodes at depth 1 has the shapes of a chain of 3, and is none. The fast path takes it as a tree."""
    cases = [
        Case([3, 4, 5 + i], SamplingParams(temperature=0.0, max_tokens=40 if i < 4 else 80, ignore_eos=True))
        for i in range(6)
    ]
    with LLM(models / "target", **LIMITS) as llm:
        plain = run_alone(llm.engine, cases)
    wishes = {**speculation("eagle3", models), "draft_len_schedule": {2: 3, 8: 1}}
    taken: list[Any] = []
    with LLM(models / "target", speculative_config=wishes, **{**SIZES, "num_kv_blocks": 400}) as llm:
        tell(llm, cases, plain)
        loop: Any = llm.engine.loop
        run = run_together(llm.engine, cases, after_step=lambda _: taken.append(loop.steady))
    assert run.outcomes == plain
    assert {draft_len for _, draft_len in run.speculation.outcomes} >= {3, 10}
    assert {one.draft_len for one in taken if one is not None} == {3, 10}


@pytest.mark.parametrize("max_tokens", [2, 9, 20])
def test_a_request_that_fills_the_cache_runs(max_tokens: int, models: Path) -> None:
    """The cache has no row for branches past the length limit, so drafts end before it does."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    cases = [Case([3 + i % 9 for i in range(64 - max_tokens)], params)]
    sizes = {"max_batch_size": 1, "max_seq_len": 64, "block_size": 4, "num_kv_blocks": 17}
    with LLM(models / "target", **sizes) as llm:
        plain = run_alone(llm.engine, cases)
    with LLM(models / "target", speculative_config=speculation("eagle3", models), **sizes) as llm:
        assert run_together(llm.engine, cases).outcomes == plain
    with LLM(
        models / "target", speculative_config=speculation("eagle3", models), **sizes | {"num_kv_blocks": None}
    ) as llm:
        assert llm.engine.loop.scheduler.allocator.capacity > 64, "by default there is room for the branches"


def test_acceptance_is_counted_by_depth(models: Path, plain: list[Outcome]) -> None:
    with LLM(models / "target", speculative_config=speculation("eagle3", models), **SIZES) as llm:
        tell(llm, CASES, plain)
        stats = run_together(llm.engine, CASES).speculation
    assert len(stats.drafted) == len(stats.accepted) == DEPTH
    assert all(0 < share < 1 for share in stats.acceptance_per_position)
    assert stats.drafted[0] == stats.num_drafts > stats.drafted[1] > stats.drafted[2]
    assert stats.num_draft_tokens > sum(stats.drafted)


def test_requests_limit_the_depth(models: Path, plain: list[Outcome]) -> None:
    wishes = speculation("eagle3", models)
    with LLM(models / "target", speculative_config=wishes, **SIZES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30, max_draft_len=2, ignore_eos=True)
        llm.generate([[3, 4, 5]], params)
        outcomes = llm.engine.stats.speculation.outcomes
        assert max(draft_len for _, draft_len in outcomes) == 6


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "error", "words"),
    [
        (
            {"speculative_token_tree": "[(0,), (1,), (1, 0)]"},
            ConfigError,
            "^speculative_token_tree=.\\[.*, \\(1, 0\\)\\]. does not contain the likeliest chain",
        ),
        ({"num_speculative_tokens": 4}, ConfigError, "tree of 10 nodes and a depth of 3 tokens but num.*=4"),
        (
            {"draft_confidence_threshold": 0.5},
            UnsupportedError,
            "draft_confidence_threshold=0.5 with a draft tree, specul.*_tree",
        ),
        (
            {"method": "ngram", "model": "ngram"},
            UnsupportedError,
            "mode=NGRAM does not take yet; use one of MTP_EAGLE, MTP_E",
        ),
        ({"num_speculative_tokens": "auto"}, ConfigError, "has one size"),
        ({"num_speculative_tokens": 10, "draft_len_schedule": {4: 10}}, ConfigError, "does not fit num.*_tokens=3"),
        ({"speculative_token_tree": "[(0,), (99,)]"}, ConfigError, "100 children of a node, and the draft knows 13"),
    ],
)
def test_what_is_not_built_is_refused(wishes: dict[str, Any], error: type[Exception], words: str, models: Path) -> None:
    with pytest.raises(error, match=words):
        LLM(models / "target", speculative_config={**speculation("eagle3", models), **wishes}, **SIZES)


GROWN = {"speculative_token_tree": None, "max_total_draft_tokens": NODES, "dynamic_tree_max_topK": 2}


@pytest.mark.parametrize("shape", [{}, GROWN], ids=["static", "dynamic"])
def test_tensorrt_refuses_branches(shape: dict[str, Any], models: Path) -> None:
    wishes = read_speculative_config({**speculation("eagle3", models), "num_speculative_tokens": DEPTH, **shape})
    words = "a draft tree on backend tensorrt is not built yet; use backend eager, cuda, aoti, onnx, or leave"
    with pytest.raises(UnsupportedError, match=words):
        plan_context(models / "target", wishes, EngineConfig(backend="tensorrt", **SIZES), BACKENDS["tensorrt"])


@pytest.mark.parametrize("count", [DEPTH, NODES, None])
def test_the_number_of_drafts_may_be_the_depth_or_that_of_the_nodes(count: int | None, models: Path) -> None:
    wishes = {**speculation("eagle3", models), "num_speculative_tokens": count}
    with LLM(models / "target", speculative_config=wishes, **SIZES) as llm:
        assert llm.engine.loop.input_builder.max_draft_len == NODES
