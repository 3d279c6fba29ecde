"""Draft trees that each step shapes for each request. tests/contract/trees.py has every mode; here are the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.async_stand_in import HostQueue
from tests.contract.trees import Watched
from tests.e2e import conformance
from tests.e2e.conformance import LIMITS, assert_as_planned, make_models
from tests.e2e.tiny import (
    VOCAB,
    Outcome,
    Run,
    add_tokenizer,
    assert_all_blocks_free,
    make_target,
    run_alone,
    run_together,
    with_constraints,
)
from trtspec import LLM, SamplingParams
from trtspec.backends.aoti import cut
from trtspec.build import build
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.config.tree import node_depths
from trtspec.core import Proposal
from trtspec.engine.overlap import OverlapLoop
from trtspec.errors import ConfigError, EngineError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.protocols import DraftRequest

CASES = conformance.CASES[:36]
DEPTH, NODES = 3, 10
TREE: dict[str, Any] = {"num_speculative_tokens": DEPTH, "max_total_draft_tokens": NODES}
GROWN = {**TREE, "dynamic_tree_max_topK": 3}
MODES: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "head", **GROWN},
    "eagle3 in two": {"method": "eagle3", "model": "head", "one_engine": False, **GROWN},
    "draft_model": {"method": "draft_model", "model": "draft", **GROWN},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **TREE},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0, **TREE},
}
LEAST = {**LIMITS, "max_batch_size": 4, "max_num_tokens": 4 * (NODES + 1)}
SIZES = {**LEAST, "num_kv_blocks": 26}
COMPILED = EngineConfig(backend="aoti", dtype="float32", **LEAST)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("dynamic-trees"))


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    with LLM(models / "target", **LIMITS) as llm:
        return run_alone(llm.engine, CASES)


def speculation(mode: str, models: Path) -> dict[str, Any]:
    wishes = MODES[mode]
    return {**wishes, "model": str(models / wishes["model"])} if "model" in wishes else wishes


def check_drafts_change_nothing(llm: LLM, plain: list[Outcome]) -> Run:
    run = run_together(llm.engine, conformance.CASES[: len(plain)])
    assert run.outcomes == plain
    assert run.speculation.num_accepted_tokens > len(plain)
    assert len(run.speculation.acceptance_per_position) == DEPTH
    assert run.num_mixed_steps > 0
    assert_all_blocks_free(llm)
    return run


@pytest.mark.parametrize("mode", ["eagle3", "ngram"])
def test_emissions_tell_the_tree_along_the_path(mode: str, models: Path) -> None:
    """The accepted drafts come first, each after the one before it. Other nodes follow, after their parents."""
    branching = 0
    with LLM(models / "target", speculation(mode, models), **SIZES) as llm:
        [request] = llm.engine.add_request(
            [3, 4, 5], SamplingParams(temperature=0.8, seed=1, max_tokens=90, ignore_eos=True)
        )
        while llm.engine.has_work:
            for emission in llm.engine.step():
                parents = list(emission.draft_parents or [])
                assert len(parents) == len(emission.drafts) == emission.draft_len
                assert parents[: emission.num_drafts] == list(range(-1, emission.num_drafts - 1))
                assert all(-1 <= parent < node for node, parent in enumerate(parents))
                assert emission.tokens[: emission.num_drafts] == list(emission.drafts[: emission.num_drafts])
                siblings = list(zip(parents, emission.drafts, strict=True))
                assert len(set(siblings)) == len(siblings), "guesses at one place differ"
                assert emission.draft_depth == max(node_depths(parents), default=0)
                branching += len(set(parents)) < len(parents) and emission.num_drafts > 0
    assert request.error is None
    assert branching > 3


@pytest.mark.parametrize("mode", MODES)
def test_tokens_on_a_gpu(mode: str, models: Path, plain: list[Outcome], work: HostQueue) -> None:
    """With one engine, steps are launched before the trees of the last one are known on the host."""
    with LLM(models / "target", speculation(mode, models), backend="cuda", debug=True, **SIZES) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop) == (mode == "eagle3")
        check_drafts_change_nothing(llm, plain)
        assert (work.num_replayed > 10) == (mode != "eagle3 in two"), "states have no CUDA graphs"


def test_a_gpu_draws_the_trees_of_the_host(models: Path, work: HostQueue) -> None:
    """The drafts that stay on the device are accepted as often as those that the host hands on."""
    params = [SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True) for t in (0.0, 2.0)]
    stats = []
    for settings in ({}, {"backend": "cuda", "debug": True}, {"backend": "cuda", "disable_overlap_scheduler": True}):
        with LLM(models / "target", speculation("eagle3", models), **SIZES | {"num_kv_blocks": 400}, **settings) as llm:
            llm.generate([[3, 4, 5]] * 2, params)
            stats.append(llm.engine.stats.speculation)
    assert stats[0].acceptance_per_position == stats[2].acceptance_per_position
    assert stats[0].num_accepted_tokens - 6 < stats[1].num_accepted_tokens


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_a_compiled_engine(mode: str, models: Path, plain: list[Outcome], tmp_path: Path) -> None:
    wanted = read_speculative_config(speculation(mode, models))
    build_engine(models / "target", tmp_path / "engine", wanted, COMPILED)
    assert_as_planned(plan_build(models / "target", wanted, COMPILED), tmp_path / "engine")
    with LLM(tmp_path / "engine", num_kv_blocks=SIZES["num_kv_blocks"]) as llm:
        check_drafts_change_nothing(llm, plain)


def test_tokens_of_compiled_ragged_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a layer and of the rest take every batch: those without drafts, and those with a tree a request."""
    monkeypatch.setattr(build, "wanted_graphs", lambda *_: [(0, False), (NODES, False)])
    monkeypatch.setattr(cut, "LEAST_LAYERS", 1)
    target = make_target(tmp_path, num_hidden_layers=1)
    add_tokenizer(target)
    build_engine(target, tmp_path / "engine", read_speculative_config(MODES["ngram"]), COMPILED)
    with LLM(target, **LIMITS) as llm:
        plain = run_alone(llm.engine, conformance.CASES)
    with LLM(tmp_path / "engine", num_kv_blocks=SIZES["num_kv_blocks"]) as llm:
        check_drafts_change_nothing(llm, plain)


@pytest.mark.parametrize("mode", ["eagle3", "ngram"])
def test_constraints_follow_the_branches(mode: str, models: Path) -> None:
    cases = with_constraints(CASES)
    with LLM(models / "target", **LIMITS) as llm:
        plain = run_together(llm.engine, cases)
    with LLM(models / "target", speculation(mode, models), **SIZES) as llm:
        run = run_together(llm.engine, cases)
    assert run.outcomes == plain.outcomes
    assert run.speculation.num_accepted_tokens > 20
    for ours, theirs in zip(run.requests, plain.requests, strict=True):
        assert (ours.logprobs and ours.logprobs.entries) == (theirs.logprobs and theirs.logprobs.entries)


ON_GPU: dict[str, Any] = {"backend": "cuda", "debug": True}


@pytest.mark.parametrize(
    ("mode", "settings"), [("eagle3", {}), ("eagle3", ON_GPU), ("eagle3 in two", {}), ("ngram", {})]
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_requests_limit_the_depth(
    mode: str, settings: dict[str, Any], depth: int, models: Path, work: HostQueue
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, max_draft_len=depth)
    with LLM(models / "target", speculation(mode, models), **SIZES, **settings) as llm:
        [output] = llm.generate([[3, 4, 5, 3, 4, 5]], params)
        stats = llm.engine.stats.speculation
    assert len(output.outputs[0].token_ids) == 20
    assert len(stats.acceptance_per_position) == depth
    assert (stats.num_draft_tokens > stats.num_drafts) == (depth > 0), "and several guesses at a depth"


@pytest.mark.parametrize("settings", [{}, ON_GPU])
def test_a_schedule_limits_the_depth(settings: dict[str, Any], models: Path, work: HostQueue) -> None:
    """Trees of two requests have one depth less than those of one, and almost as many nodes."""
    wishes = {**speculation("eagle3", models), "draft_len_schedule": {1: DEPTH, 4: DEPTH - 1}}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(models / "target", wishes, **SIZES, **settings) as llm:
        for count, depth, nodes in ((2, DEPTH - 1, NODES - 1), (1, DEPTH, NODES)):
            for _ in range(count):
                llm.engine.add_request([3, 4, 5], params)
            trees = []
            while llm.engine.has_work:
                trees += [(one.draft_depth, one.draft_len) for one in llm.engine.step()]
            assert max(trees) == (depth, nodes)


# --- a user's drafter -------------------------------------------------------------------------------------------------


class Branches:
    """A user's drafter that knows the right continuation, and hides it in random trees. change: spoils a proposal."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = answers
        self.rng = random.Random(0)
        self.change: Any = lambda proposal: proposal

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        K = max(request.max_draft_len for request in requests)
        rows, parents, lens = [], [], []
        for request in requests:
            assert request.max_depth is not None
            assert 1 <= request.max_depth <= DEPTH
            length = self.rng.randint(0, request.max_draft_len)
            above = [self.rng.randrange(-1, node) for node in range(length)]
            answer, known = self.answers[request.request_id], len(request.tokens)
            tokens = []
            for depth in node_depths(above):
                right = known + depth - 1 < len(answer) and self.rng.random() < 0.7
                tokens.append(answer[known + depth - 1] if right else self.rng.randrange(VOCAB))
            rows.append(tokens + [0] * (K - length))
            parents.append(above + [-1] * (K - length))
            lens.append(length)
        made = Proposal(torch.tensor(rows), torch.tensor(lens), draft_parents=torch.tensor(parents))
        return self.change(made)  # type: ignore[no-any-return]

    def forget(self, request_id: int) -> None:
        """Do nothing: there is no state to drop."""


def custom(drafter: Branches, **wishes: Any) -> dict[str, Any]:
    return {"method": "custom_class", "drafter": drafter, **TREE, **wishes}


def test_any_tree_of_a_users_drafter(models: Path, plain: list[Outcome]) -> None:
    """Nodes deeper than the limit are dropped, and their descendants; the order of nodes is the drafter's."""
    answers = [[*case.prompt, *one.token_ids] for case, one in zip(CASES, plain, strict=True)]
    with LLM(models / "target", custom(Branches(answers)), **SIZES) as llm:
        run = check_drafts_change_nothing(llm, plain)
        assert llm.engine.loop.scheduler.num_preemptions > 0
    assert all(share > 0.3 for share in run.speculation.acceptance_per_position[:2])


class Wide(Branches):
    """A drafter of as many siblings as it may give, of which the last one is right."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        K = max(request.max_draft_len for request in requests)
        tokens = torch.zeros(len(requests), K, dtype=torch.int64)
        for row, request in zip(tokens, requests, strict=True):
            n = request.max_draft_len
            right = self.answers[request.request_id][len(request.tokens)]
            row[:n] = torch.tensor([*[one for one in range(VOCAB) if one != right][: n - 1], right])
        lens = torch.tensor([request.max_draft_len for request in requests])
        return Proposal(tokens, lens, draft_parents=torch.full_like(tokens, -1))


def test_a_wide_tree_at_the_length_limit(models: Path) -> None:
    """All nodes may be at depth 1, also where only one more token fits. Their rows have blocks of their own."""
    sizes = {**SIZES, "max_batch_size": 8, "max_num_tokens": 8 * (NODES + 1), "num_kv_blocks": None, "max_seq_len": 41}
    params = [SamplingParams(temperature=t, seed=3, max_tokens=35, ignore_eos=True) for t in (0.0, 1.0)] * 12
    prompts = [[1 + (i * 7 + j * 3) % (VOCAB - 1) for j in range(6)] for i in range(24)]
    with LLM(models / "target", **sizes | {"max_num_tokens": 64}) as llm:
        plain = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    answers = [[*prompt, *ids] for prompt, ids in zip(prompts, plain, strict=True)] * 2
    with LLM(models / "target", custom(Wide(answers)), **sizes) as llm:
        past: list[str] = []
        llm.engine.loop.input_builder = Watched(llm.engine.loop.input_builder, past)  # type: ignore[assignment]
        for _ in range(2):  # the second time with blocks that the first one published
            found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
            assert found == plain
            assert not past
        assert llm.engine.stats.speculation.acceptance_length > 1.8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft_parents": torch.full((1, NODES), 3)}, r"draft_parents \[3.* of \d+ drafts; a parent comes first"),
        ({"draft_parents": torch.full((1, NODES), -2)}, "a parent comes first"),
        ({"draft_parents": torch.zeros(1, 2, 2)}, r"gave draft_parents .*\[1, K\]"),
    ],
)
def test_a_tree_that_is_none_costs_its_request_the_drafts(
    change: dict[str, Any], words: str, models: Path, plain: list[Outcome]
) -> None:
    drafter = Branches([[*CASES[0].prompt, *plain[0].token_ids]])
    drafter.change = lambda proposal: replace(proposal, draft_lens=proposal.draft_lens * 0 + 2, **change)
    with LLM(models / "target", custom(drafter), **SIZES) as llm:
        run = run_together(llm.engine, CASES[:1])
    assert run.outcomes == plain[:1]
    assert run.requests[0].drafter_error is not None
    with pytest.raises(EngineError, match=words):
        raise run.requests[0].drafter_error


def test_a_tree_for_an_engine_of_chains_is_refused(models: Path, plain: list[Outcome]) -> None:
    class Unasked(Branches):
        def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
            zeros = torch.zeros(len(requests), 1, dtype=torch.int64)
            return Proposal(zeros, zeros[:, 0] + 1, draft_parents=zeros - 1)

    wishes = {"method": "custom_class", "drafter": Unasked([]), "num_speculative_tokens": DEPTH}
    with LLM(models / "target", wishes, **SIZES) as llm:
        run = run_together(llm.engine, CASES[:1])
    assert run.outcomes == plain[:1]
    assert "leave them unset, as this engine verifies chains" in str(run.requests[0].drafter_error)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "wishes", "error", "words"),
    [
        (
            "eagle3",
            {"max_total_draft_tokens": 2},
            ConfigError,
            "=2 is less than 3, the depth of the tree; use at least 3",
        ),
        ("eagle3", {"max_total_draft_tokens": 22}, ConfigError, "has at most 21 nodes; use at most 21"),
        ("eagle3", {"dynamic_tree_max_topK": None}, ConfigError, "without dynamic_tree_max_topK; set it"),
        (
            "eagle3",
            {"draft_confidence_threshold": 0.5},
            UnsupportedError,
            "with a draft tree, max_total_draft_tokens=10",
        ),
        ("eagle3", {"num_speculative_tokens": "auto"}, UnsupportedError, "'auto' with max_total_draft_tokens=10"),
        ("ngram", {"dynamic_tree_max_topK": 3}, ConfigError, "means nothing to method='ngram', which finds its trees"),
        ("ngram", {"is_public_pool": True}, UnsupportedError, "is_public_pool=True with max_total_draft_tokens=10"),
        ("ngram", {"num_speculative_tokens": "auto"}, UnsupportedError, "'auto' with max_total_draft_tokens=10"),
    ],
)
def test_what_is_not_built_is_refused(
    mode: str, wishes: dict[str, Any], error: type[Exception], words: str, models: Path
) -> None:
    with pytest.raises(error, match=words):
        LLM(models / "target", {**speculation(mode, models), **wishes}, **SIZES)
