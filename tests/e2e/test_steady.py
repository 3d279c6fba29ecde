"""Steps that do not read the requests equal steps that do.

Two engines run the same requests. One of them updates its requests after every step, so that it reads all of them in
the next step.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.e2e.head_cases import watch
from tests.e2e.test_trees import tell
from tests.e2e.tiny import Case, Outcome, assert_all_blocks_free, draw_cases, run_alone
from tests.head_checkpoints import make_eagle3
from trtspec import LLM
from trtspec.core import SpecMetadata, StepInputs, StepOutputs
from trtspec.engine import steady
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.methods.worker import SpecWorker
from trtspec.protocols import Executable

K = 3
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 48, "num_kv_blocks": 64, "block_size": 4}


class Recorder:
    """The target, recording its inputs. If `fails` is set, it fails once, in a batch of more than one request."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.given: list[dict[str, Any]] = []
        self.fails = self.failed = False

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self.fails and inputs.spec.batch_size > 1:
            self.fails, self.failed = False, True
            raise RuntimeError("told to")
        spec, tables = inputs.spec, inputs.attn.block_tables
        used = int(tables.any(0).sum())  # scratch columns at the end do not count
        self.given.append(
            {
                "ids": inputs.input_ids.tolist(),
                "rows": inputs.attn.cu_q_lens.tolist(),
                "kv_lens": inputs.attn.kv_lens.tolist(),
                "tables": tables[:, :used].tolist(),
                "drafts": spec.draft_tokens.tolist(),
                "positions": spec.sampling.positions.tolist(),
                "seeds": spec.sampling.seeds.tolist(),
                "requests": spec.request_ids,
                "prompts": spec.next_prompt_token.tolist(),
                "next_draft_len": spec.next_draft_len,
            }
        )
        return self.inner.run(inputs)


def draw(count: int, seed: int) -> list[Case]:
    """Random cases. Many are long and without stops, so that a batch goes on; some have no text."""
    rng = random.Random(seed)
    cases = []
    for case in draw_cases(count, seed, most_prompt=30, most_tokens=24):
        if rng.random() < 0.6:
            most = rng.randint(20, 60)
            case = dataclasses.replace(
                case, params=dataclasses.replace(case.params, max_tokens=most, min_tokens=0, ignore_eos=True)
            )
        if rng.random() < 0.7:
            case = dataclasses.replace(case, params=dataclasses.replace(case.params, stop=(), detokenize=False))
        if rng.random() < 0.5:
            case = dataclasses.replace(case, params=dataclasses.replace(case.params, stop_token_ids=()))
        cases.append(case)
    return cases


def seen(emissions: list[Emission]) -> list[tuple[object, ...]]:
    return [(emission.request.request_id, *emission[1:]) for emission in emissions]


def state(request: Request) -> tuple[object, ...]:
    """All that a step may change in a request."""
    kv = request.kv
    stats = dict(request.stats.outcomes)
    return request.tokens, request.drafts, kv.committed, kv.draft_kv_len, kv.blocks, stats, Outcome.of(request)


class Pair:
    """Two engines with the same requests: `ahead` may leave requests alone, `settled` may not."""

    def __init__(self, make: Callable[[], LLM]) -> None:
        self.llms = make(), make()
        self.recorders = []
        for llm in self.llms:
            self.recorders.append(Recorder(llm.engine.loop.target))
            llm.engine.loop = dataclasses.replace(llm.engine.loop, target=self.recorders[-1])
        self.requests: tuple[list[Request], list[Request]] = ([], [])
        self.count: Counter[str] = Counter()

    def add(self, case: Case) -> None:
        for llm, requests in zip(self.llms, self.requests, strict=True):
            requests += llm.engine.add_request(case.prompt, case.params)

    def abort(self, number: int) -> None:
        emissions = [
            llm.engine.abort(requests[number].request_id)
            for llm, requests in zip(self.llms, self.requests, strict=True)
        ]
        shown = [None if emission is None else seen([emission]) for emission in emissions]
        assert shown[0] == shown[1]

    def fail(self) -> None:
        for recorder in self.recorders:
            recorder.fails = True

    def step(self) -> None:
        ahead, settled = (llm.engine for llm in self.llms)
        told = ahead.loop.steady
        emissions = seen(ahead.step())
        self.count["steps"] += 1
        self.count["steady"] += told is not None and ahead.loop.steady is told
        assert emissions == seen(settled.step())
        settled.settle()
        given, expected = (recorder.given for recorder in self.recorders)
        failed = [recorder.failed for recorder in self.recorders]
        assert failed[0] == failed[1]
        self.count["failed"] += failed[0]
        assert given == expected or failed[0]  # one launches all again, the other halves
        for recorder in self.recorders:
            recorder.failed = False
            recorder.given.clear()
        for ours, theirs in zip(*self.requests, strict=True):
            assert ours.finished == theirs.finished
            if ours.finished:
                assert state(ours) == state(theirs)

    def compare(self) -> None:
        self.llms[0].engine.settle()
        assert list(map(state, self.requests[0])) == list(map(state, self.requests[1]))


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("steady"), target, (0, 1), tuple(range(11)))


QUICK = ((True, 3), (False, 0), (False, 3))  # both sizes of blocks
REST = [(speculates, seed) for speculates in (True, False) for seed in range(6) if (speculates, seed) not in QUICK]


@pytest.mark.parametrize(
    ("speculates", "seed"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in REST)]
)
def test_steady_steps_are_steps_like_others(
    target: Path, folder: Path, speculates: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_steps(target, folder, speculates, random.Random(f"{speculates} {seed}"), seed, monkeypatch)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 1, 3))])
def test_a_batch_goes_on_until_somebody_has_fewer_drafts(
    target: Path, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steady batch goes on until a request has fewer drafts. Here a worker cuts drafts now and then."""
    short = []

    def draft_lens(worker: SpecWorker, drafts: Tensor, hidden: Tensor, spec: SpecMetadata) -> Tensor:
        odd = drafts.sum(1) % 20
        short.append(int((odd < spec.next_draft_len).sum()))
        return odd.clamp(max=spec.next_draft_len).int()

    monkeypatch.setattr(SpecWorker, "draft_lens", draft_lens)
    compare_steps(target, folder, True, random.Random(f"fewer {seed}"), seed, monkeypatch)
    assert sum(short) > 20


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3))])
def test_trees_of_one_shape_go_on_too(target: Path, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_steps(target, folder, True, random.Random(f"trees {seed}"), seed, monkeypatch, TREE)


def compare_steps(
    target: Path,
    folder: Path,
    speculates: bool,
    rng: random.Random,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tree: str | None = None,
) -> None:
    """Compare the steps of two engines.

    Arrivals, aborts, failing launches, prompts in chunks, full caches and comparisons come in random order.
    """
    monkeypatch.setattr(steady, "MAX_STEPS", rng.choice((1, 2, 5, 32)))
    limits = {**LIMITS, "num_kv_blocks": rng.choice((26, 34, 64)), "block_size": rng.choice((2, 4))}
    if limits["block_size"] == 2:
        limits["num_kv_blocks"] *= 2
    cases = draw(14, seed)
    with LLM(target, enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    answers = [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": K} if speculates else None
    if speculation is not None and tree is not None:
        speculation = {**speculation, "num_speculative_tokens": None, "speculative_token_tree": tree}
    lie = rng.choice((0.0, 0.3))

    def make() -> LLM:
        llm = LLM(target, speculation, **limits)
        if tree is not None:
            tell(llm, cases, outcomes)
        elif speculates:
            watch(llm, answers, lie)
        return llm

    pair = Pair(make)
    aborted = set()
    pending = list(cases)
    with pair.llms[0], pair.llms[1]:
        while pending or pair.llms[0].engine.has_work:
            event = rng.random()
            if pending and event < 0.08:
                pair.add(pending.pop(0))
            elif event < 0.09 and pair.requests[0]:
                aborted.add(number := rng.randrange(len(pair.requests[0])))
                pair.abort(number)
            elif event < 0.10:
                pair.fail()
            elif event < 0.13:
                pair.compare()
            elif pair.llms[0].engine.has_work:
                pair.step()
        pair.compare()
        for llm in pair.llms:
            assert_all_blocks_free(llm)
    for number, (request, outcome) in enumerate(zip(pair.requests[0], outcomes, strict=True)):
        if number not in aborted and request.error is None:
            assert Outcome.of(request) == outcome
    assert pair.count["steady"] > pair.count["steps"] / 4, pair.count


def test_a_batch_that_goes_on_is_not_looked_at(target: Path, folder: Path) -> None:
    """Requests of a steady batch get their tokens late, but all of them in the end. Text is never late."""
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": K}
    (case,) = draw_cases(1, seed=3)
    params = dataclasses.replace(case.params, max_tokens=60, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    with LLM(target, speculation, **LIMITS) as llm:
        engine = llm.engine
        (silent,) = engine.add_request(case.prompt, dataclasses.replace(params, detokenize=False))
        (shown,) = engine.add_request(case.prompt, params)
        news: dict[int, list[int]] = {silent.request_id: [], shown.request_id: []}
        texts, late = "", 0
        while engine.has_work:
            for emission in engine.step():
                news[emission.request.request_id] += emission.tokens
                texts += emission.text
            late += silent.output_ids != news[silent.request_id]
            assert shown.output_ids == news[shown.request_id]
            assert shown.shown_text == texts
        assert late > 5
        assert silent.output_ids == shown.output_ids == news[silent.request_id]
        assert silent.stats == shown.stats
