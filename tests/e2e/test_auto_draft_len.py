"""num_speculative_tokens="auto": the engine chooses how many drafts a step makes and verifies, which changes no token.

Here the choices are at random, so that every change from one number to another happens, on the fast path of
engine/steady.py too.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import conformance
from tests.e2e.conformance import LIMITS, make_models, packed
from tests.e2e.tiny import Outcome, run_alone, run_together
from tests.head_checkpoints import make_medusa
from trtspec import LLM, SamplingParams
from trtspec.build import step_times
from trtspec.build.build import build_engine
from trtspec.build.engine_folder import EngineFolder
from trtspec.config.engine import EngineConfig
from trtspec.core import StepInputs, StepOutputs
from trtspec.engine import propose
from trtspec.engine.draft_chances import Offer
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.request import Request
from trtspec.engine.steady import SteadyLoop
from trtspec.engine.step_costs import Cell, StepCosts
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.reading import read_speculative_config

DEMO = Path(__file__).parents[2] / "examples" / "demo"
CASES = conformance.CASES[20:]
AUTO: dict[str, Any] = {"num_speculative_tokens": "auto"}
MODES: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "head"},
    "eagle": {"method": "eagle", "model": "eagle"},
    "eagle3 and lookups": {"method": "eagle3", "model": "head", "sa_config": {"threshold": 2}},
    "draft inside": {"method": "draft_model", "model": "draft", "one_engine": True},
    "eagle3, two engines": {"method": "eagle3", "model": "head", "one_engine": False},
    "draft model": {"method": "draft_model", "model": "draft"},
    "draft model and lookups": {"method": "draft_model", "model": "draft", "sa_config": {"threshold": 2}},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
}
SIZES = {**LIMITS, "max_num_tokens": 72, "num_kv_blocks": 31}  # 8 requests with 8 drafts each, in too few blocks
ROOMY = {**SIZES, "max_batch_size": 2, "num_kv_blocks": 128}  # batches go on for a while


class Whims(DraftLength):
    """Choices at random. Most of them last for some steps."""

    def __init__(self, chooser: DraftLength) -> None:
        super().__init__(chooser.costs, chooser.most)
        self.rng = random.Random(1)
        self.count: Counter[int] = Counter()

    def asks(self, request_id: int, batch: int) -> bool:
        return self._launches % 8 < 3 or not self.looks_up

    def _make(self, pairs: Any, batch: int) -> int:
        made = self.made if self.rng.random() > 0.3 else self.rng.choice(self.costs.draft_lens)
        made = made if pairs else 0
        self.count[made] += 1
        return made

    def _verify(self, pairs: Any, batch: int) -> list[int]:
        some = self.rng.random() < 0.2
        return [self.rng.randint(0, count) if some else count for _, count in pairs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("auto"))


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    with LLM(models / "target", **LIMITS) as llm:
        return run_alone(llm.engine, CASES)


def speculation(mode: str, models: Path) -> dict[str, Any]:
    wishes = {**MODES[mode], **AUTO}
    if "model" in wishes:
        wishes["model"] = str(models / wishes["model"])
    return wishes


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Number of steps on the fast path (True), and of steps that left it."""
    count: Counter[bool] = Counter()
    repeat = SteadyLoop.repeat

    def counted(loop: SteadyLoop, steady: Any) -> Any:
        emissions = repeat(loop, steady)
        count[emissions is not None] += 1
        return emissions

    monkeypatch.setattr(SteadyLoop, "repeat", counted)
    return count


@pytest.mark.parametrize("mode", MODES)
def test_any_choice_gives_the_tokens_of_plain_decoding(mode: str, models: Path, plain: list[Outcome]) -> None:
    with LLM(models / "target", speculation(mode, models), backend="eager", **SIZES) as llm:
        proposer = llm.engine.loop.proposer
        assert proposer.chooser is not None
        whims = proposer.chooser = Whims(proposer.chooser)
        run = run_together(llm.engine, CASES)
        assert run.outcomes == plain
        assert llm.engine.loop.scheduler.num_preemptions > 0 or mode == "suffix"  # which keeps more blocks in reserve
        shares = run.speculation.acceptance_per_position
        assert 3 <= len(shares) <= whims.most
        assert all(0 < share < 1 for share in shares[:3])
        assert all(whims.count[length] > 3 for length in whims.costs.draft_lens), whims.count
        assert not whims._requests, "what is known of a request is dropped when it ends"


def test_adaptive_verification_is_auto_up_to_its_number(models: Path, plain: list[Outcome]) -> None:
    wishes = {**speculation("eagle3", models), "num_speculative_tokens": 4, "enable_adaptive_verification": True}
    with LLM(models / "target", wishes, backend="eager", **SIZES) as llm:
        proposer = llm.engine.loop.proposer
        assert proposer.chooser is not None
        whims = proposer.chooser = Whims(proposer.chooser)
        run = run_together(llm.engine, CASES)
        assert run.outcomes == plain
        assert set(whims.count) == {0, 1, 3, 4}
        assert len(run.speculation.acceptance_per_position) == 4


@pytest.mark.parametrize("mode", ["eagle3", "draft inside", "ngram"])
def test_the_fast_path_is_entered_and_left(
    mode: str, models: Path, plain: list[Outcome], repeats: Counter[bool]
) -> None:
    with LLM(models / "target", speculation(mode, models), backend="eager", **ROOMY) as llm:
        proposer = llm.engine.loop.proposer
        assert proposer.chooser is not None
        proposer.chooser = Whims(proposer.chooser)
        assert run_together(llm.engine, CASES).outcomes == plain
        assert not proposer.chooser._requests
    assert min(repeats[True], repeats[False]) > 15, repeats


def costs(makes: Sequence[int], most: int) -> StepCosts:
    """Steps in which verified rows cost so little that drafts often pay."""
    kinds = [(made, length) for made in makes for length in (makes if len(makes) > 1 else range(most + 1))]
    return StepCosts(
        [Cell(made, batch, n, 1 + 0.02 * made + 0.01 * batch * n) for made, n in kinds for batch in (1, 8)]
    )


FREE: dict[str, Any] = {}
SCHEDULED = {"draft_len_schedule": {2: 5, 4: 2, 8: 1}}


@pytest.mark.parametrize(
    ("mode", "sizes", "limits"),
    [
        ("draft inside", ROOMY, FREE),
        ("draft inside", SIZES, SCHEDULED),
        ("eagle3, two engines", SIZES, FREE),
        ("draft model", SIZES, SCHEDULED),
        ("ngram", SIZES, FREE),
        ("suffix", SIZES, SCHEDULED),
        *(
            pytest.param(*others, marks=pytest.mark.long)
            for others in (
                ("draft inside", ROOMY, SCHEDULED),
                ("draft inside", SIZES, FREE),
                ("eagle3, two engines", SIZES, SCHEDULED),
                ("draft model", SIZES, FREE),
                ("ngram", SIZES, SCHEDULED),
                ("suffix", SIZES, FREE),
            )
        ),
    ],
)
def test_its_own_choices_do_too(
    mode: str, sizes: dict[str, Any], limits: dict[str, Any], models: Path, plain: list[Outcome]
) -> None:
    """They are the same again if the calls are repeated. Schedules and the limits of requests are kept."""
    wishes = {**speculation(mode, models), **limits}
    if mode == "suffix" and limits:
        wishes["draft_len_schedule"] = {2: 8, 4: 2, 8: 1}
    with LLM(models / "target", wishes, backend="eager", **sizes) as llm:
        proposer = llm.engine.loop.proposer
        assert proposer.chooser is not None
        table = costs(proposer.chooser.costs.draft_lens, proposer.chooser.most)
        chooser = proposer.chooser = DraftLength(table, proposer.chooser.most)
        chooser.trace = []
        cases = [replace(case, params=replace(case.params, max_draft_len=i % 5)) for i, case in enumerate(CASES)]
        run = run_together(llm.engine, cases)
        assert run.outcomes == plain
        stats = run.speculation
        least = 15 if mode == "eagle3, two engines" else 20
        assert least < stats.num_accepted_tokens < stats.num_draft_tokens, stats
        for i, request in enumerate(run.requests):
            assert all(drafts <= i % 5 for _, drafts in request.stats.outcomes)
        again = DraftLength(table, chooser.most)
        for call, asked, answer in chooser.trace:
            assert getattr(again, call)(*asked) == answer
        assert {call for call, _, _ in chooser.trace} == {"make", "verify", "observe", "time", "forget"}
        offers = [offer for call, asked, _ in chooser.trace if call == "verify" for offer in asked[0]]
        scored = mode in ("draft inside", "eagle3, two engines")
        assert all(len(offer.scores) == scored * offer.length for offer in offers)
        assert all(0 < score <= 1 for offer in offers for score in offer.scores)


def test_scores_stay_with_their_drafts(monkeypatch: pytest.MonkeyPatch, repeats: Counter[bool]) -> None:
    """Where the fast path is left, too: each offer has the scores that the launch gave its drafts.

    Requests with text take another way through the fast path than those without.
    """
    speculation = {"method": "eagle3", "model": str(DEMO / "eagle3"), **AUTO}
    given: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    offered: list[tuple[Offer, list[float]]] = []
    with LLM(DEMO / "target", speculation, backend="eager", max_batch_size=2) as llm:
        loop = llm.engine.loop
        run, offer_of = loop.target.run, propose._offer

        def launch(inputs: StepInputs) -> StepOutputs:
            outputs = run(inputs)
            assert outputs.proposal is not None
            assert outputs.proposal.draft_scores is not None
            made, scores = outputs.proposal.draft_tokens.tolist(), outputs.proposal.draft_scores.tolist()
            for request_id, drafts, judged in zip(inputs.spec.request_ids, made, scores, strict=True):
                given.update({(request_id, tuple(drafts[:n])): judged[:n] for n in range(1, len(drafts) + 1)})
            return outputs

        def offer(request: Request) -> Offer:
            made = offer_of(request)
            offered.append((made, given[request.request_id, tuple(request.drafts)]))
            return made

        monkeypatch.setattr(loop.target, "run", launch)
        monkeypatch.setattr(propose, "_offer", offer)
        loop.proposer.chooser = Whims(DraftLength(costs((0, 1, 3, 5), 5), 5))
        params = [
            SamplingParams(temperature=0.0, max_tokens=60, detokenize=text, ignore_eos=True) for text in (True, False)
        ]
        llm.generate(["def quicksort(", "class Tree:"], params, use_tqdm=False)
    assert min(repeats[True], repeats[False]) > 3, repeats
    assert len({one.source for one, _ in offered}) == 2
    assert all(list(one.scores) == scores for one, scores in offered)


def test_steps_are_measured_once_for_an_engine_folder(models: Path, tmp_path: Path) -> None:
    """Times are measured again if the file is damaged, or is from another number of threads or other kernels."""
    folder = tmp_path / "engine"
    folder.mkdir()
    with LLM(models / "target", speculation("eagle3", models), backend="eager", **SIZES) as llm:
        chooser, loop = llm.engine.loop.proposer.chooser, llm.engine.loop
        assert chooser is not None

        def measured() -> Any:
            return step_times.step_costs(
                loop.target, None, loop.input_builder, chooser.costs.draft_lens, 2, 31, 4, 128, folder
            ).cells

        first = measured()
        assert measured() == first
        file = folder / step_times.FILE
        kept = json.loads(file.read_text())
        for damaged in ("{", "[1]", json.dumps([{**kept[0], "cells": []}])):
            file.write_text(damaged)
            assert measured() != first
        for fact, other in (("threads", 99), ("libraries", ["libtrtspec_cpu-0123456789abcdef.so"])):
            older = {**kept[0], "facts": {**kept[0]["facts"], fact: other}}
            assert older["facts"] != kept[0]["facts"]
            file.write_text(json.dumps([older]))
            assert measured() != first
            assert json.loads(file.read_text())[1] == older, "those of another machine stay"
    assert {(cell.made, cell.batch) for cell in first} >= {(made, batch) for made in (0, 1, 3, 5) for batch in (1, 2)}


def test_kinds_of_steps_take_turns() -> None:
    """So a slow moment of the machine is no property of one kind."""
    calls: list[str] = []
    times = step_times._fastest([lambda: calls.append("a"), lambda: calls.append("b")])
    assert calls == ["a", "b"] * (step_times.ROUNDS + 1)
    assert len(times) == 2


def test_batches_are_measured_from_both_ends() -> None:
    assert step_times._batches(1) == [1]
    assert step_times._batches(2) == [1, 2]
    assert step_times._batches(8)[:2] == [1, 8]
    assert sorted(step_times._batches(24)) == [1, 2, 4, 8, 16, 24]
    assert step_times._batches(32)[2] in (4, 8)


@pytest.mark.parametrize(
    ("wishes", "error", "words"),
    [
        ({"method": "custom_class", "drafter": "a:B"}, UnsupportedError, "'custom_class' is not built; set num_spec"),
        (
            {"method": "eagle3", "model": "head", "draft_confidence_threshold": 0.5},
            UnsupportedError,
            "='auto' is not built yet; leave draft_confidence_threshold unset, or set num_speculative_tokens",
        ),
        ({"method": "ngram", "num_speculative_tokens": "most"}, ConfigError, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, ConfigError, "num_speculative_tokens"),
    ],
)
def test_what_is_not_built_is_refused(wishes: dict[str, Any], error: type[Exception], words: str, models: Path) -> None:
    if "model" in wishes:
        wishes = {**wishes, "model": str(models / wishes["model"])}
    with pytest.raises(error, match=words):
        LLM(models / "target", {**AUTO, **wishes}, backend="eager", **SIZES)


@pytest.mark.long
def test_a_compiled_engine_has_graphs_for_every_choice(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    head = make_medusa(tmp_path, models / "target", num_heads=2)
    wishes = read_speculative_config({"method": "medusa", "model": str(head), **AUTO})
    limits = {**LIMITS, "max_num_tokens": 72}
    build_engine(models / "target", folder, wishes, EngineConfig(backend="aoti", dtype="float32", **limits))
    engine = EngineFolder.open(folder)
    assert engine is not None
    assert {graph["draft_len"] for graph in engine.data["executables"]["target"]["graphs"]} == {0, 1, 2}
    with LLM(folder, num_kv_blocks=31) as llm:
        proposer = llm.engine.loop.proposer
        assert proposer.chooser is not None
        assert (folder / step_times.FILE).is_file()
        found = proposer.chooser.costs.cells
        proposer.chooser = Whims(proposer.chooser)
        with LLM(models / "target", **LIMITS) as plain:
            assert packed(llm).outcomes == run_alone(plain.engine, conformance.CASES)
    with LLM(folder, num_kv_blocks=31) as llm:
        assert llm.engine.loop.proposer.chooser is not None
        assert llm.engine.loop.proposer.chooser.costs.cells == found
        (output,) = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 9
