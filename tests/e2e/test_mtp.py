"""MTP layers of the target's own checkpoint: speculation changes no output, and each draft is made of the right bits.

There is one module for all drafts (inside the target or next to it), one module for each draft, or fewer modules than
drafts.

The reference for outputs is plain decoding of each request alone. The reference for drafts is an engine that prefills
each prompt at once and never uses a draft (head_cases.log_plainly). Comparing with it tests the states that a module
keeps of the last step, and the rows that it computes again once their tokens are known.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.head_cases import (
    PLAIN,
    ROOMY,
    TIGHT,
    Place,
    Reference,
    assert_right,
    chunks_of,
    first_wrong_draft,
    log_plainly,
    refer,
    run_watched,
    step_of,
    watch,
)
from tests.e2e.tiny import Case, Outcome, add_tokenizer, draw_cases, make_target, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import UnsupportedError
from trtspec.models.layers import Linear
from trtspec.sampling_params import sample_seed

SHORT = [Case([2, 9, 4][:n], SamplingParams(temperature=1.0, seed=n, max_tokens=9)) for n in (1, 2, 3)]
CASES = [*SHORT, *draw_cases(9, seed=41, most_prompt=60)]


@dataclass(frozen=True)
class Way:
    """Number of modules, number of drafts, and the fields that choose the mode."""

    modules: int
    K: int
    one_engine: bool = True
    vanilla: bool = False

    def __str__(self) -> str:
        mode = "MTP" if self.vanilla else "MTP_EAGLE_ONE_MODEL" if self.one_engine else "MTP_EAGLE"
        return f"{mode}-{self.modules}-{self.K}"

    @property
    def inside(self) -> Way:
        """The same with the modules inside the target, which makes the reference for the drafts."""
        return dataclasses.replace(self, one_engine=True)


WAYS = (
    Way(1, 1),
    Way(1, 3),
    Way(1, 3, one_engine=False),
    Way(2, 2, vanilla=True),
    Way(3, 2, vanilla=True),
    Way(3, 3, vanilla=True),
    Way(2, 4),
    Way(3, 6),
)
EACH = tuple(way for way in WAYS if way.vanilla and way.modules == way.K)
AGAIN = tuple(way for way in WAYS if way.K > way.modules > 1)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of modules -> a target of MiMo's architecture with that many."""

    def make(modules: int) -> Path:
        folder = make_target(tmp_path_factory.mktemp("mimo"), "mimo", num_nextn_predict_layers=modules)
        add_tokenizer(folder)
        return folder

    return functools.cache(make)


def batch_of(way: Way) -> int:
    """Number of requests that a step of TIGHT has rows for."""
    return min(8, TIGHT["max_num_tokens"] // (way.K + 1))


Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(targets: Callable[[int], Path]) -> Make:
    """(way, engine options) -> LLM."""

    def make(way: Way, **options: Any) -> LLM:
        words = {"num_speculative_tokens": way.K, "one_engine": way.one_engine, "vanilla": way.vanilla}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*runs (one MTP layer|each of)")
            return LLM(targets(way.modules), {"method": "mtp", **words}, **options)

    return make


@pytest.fixture(scope="module")
def reference(targets: Callable[[int], Path], make: Make) -> Callable[[Way], Reference]:
    """way -> the reference of CASES, computed with the modules inside the target."""

    @functools.cache
    def compute(way: Way) -> Reference:
        return refer(targets(way.modules), lambda: make(way, **PLAIN), CASES)

    return lambda way: compute(way.inside)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_drafts_right_and_wrong_at_every_place(make: Make, reference: Callable[[Way], Reference], way: Way) -> None:
    """Drafts are right and wrong at every position, in a cache too small for all, with prompts in chunks.

    Requests end inside a draft.
    """
    with make(way, max_batch_size=batch_of(way), **TIGHT) as llm:
        assert llm.engine.loop.input_builder.mode.name == str(way).partition("-")[0]
        run = assert_right(llm, reference(way), told=True)
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == way.K
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0


@pytest.mark.parametrize("way", [WAYS[1], *EACH, *AGAIN], ids=str)
def test_the_heads_own_drafts(make: Make, reference: Callable[[Way], Reference], way: Way) -> None:
    with make(way, max_batch_size=batch_of(way), **TIGHT) as llm:
        run = assert_right(llm, reference(way).first(8), told=False)
        assert 0 < run.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("rows", [1, 4, *(pytest.param(rows, marks=pytest.mark.long) for rows in (2, 3, 17))])
@pytest.mark.parametrize("way", [*EACH, AGAIN[0]], ids=str)
def test_chunks_of_prompts(make: Make, reference: Callable[[Way], Reference], way: Way, rows: int) -> None:
    """Prompts in chunks change no draft, even in chunks with fewer rows than a module is deep."""
    with make(way, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        assert_right(llm, reference(way).first(8), told=rows % 2 == 0)
        assert most() == rows


@pytest.mark.parametrize("way", [*EACH, *AGAIN], ids=str)
def test_a_draft_length_for_every_step(make: Make, reference: Callable[[Way], Reference], way: Way) -> None:
    """Every step may have another draft length: modules that did not draft have read all rows all the same."""
    with make(way, max_batch_size=min(batch_of(way), 6), **{**TIGHT, "num_kv_blocks": 60}) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: (way.K, 0, 1, 2)[engine.stats.steps % 4]  # type: ignore[method-assign]
        assert_right(llm, reference(way), told=True)


BASE = [1 + i * i % 14 for i in range(42)]


@pytest.mark.parametrize("rows", [1, *(pytest.param(rows, marks=pytest.mark.long) for rows in (None, 3))])
@pytest.mark.parametrize("way", [WAYS[1], *EACH, AGAIN[0]], ids=str)
def test_shared_prefixes(targets: Callable[[int], Path], make: Make, way: Way, rows: int | None) -> None:
    """Requests reuse each other's blocks, free or in use, and prefill the rest in chunks of few rows.

    Results that depend on drafts must never be in a shared block.
    """
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(BASE, params), *(Case([*BASE[: 4 * n], 15, 15 - n, *BASE[:9]], params) for n in range(2, 11, 2))]
    cases += [Case(BASE[:n], params) for n in (21, 22, 23, 24, 41)]
    expected = refer(targets(way.modules), lambda: make(way, **PLAIN), cases)
    with make(way, max_batch_size=3, **ROOMY) as llm:
        if rows is not None:
            chunks_of(llm, rows)
        assert_right(llm, expected, told=True)
        assert llm.engine.stats.prefix_hit_tokens > 100


def test_rows_that_wait_for_tokens_are_not_found(targets: Callable[[int], Path], make: Make) -> None:
    """Rows that wait for tokens are not found by other requests.

    One request is aborted between two chunks, at the end of a block. Another one prefills the same prompt without
    reuse. A third reuses blocks of both.
    """
    way, case = Way(3, 3, vanilla=True), Case(BASE, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    expected = refer(targets(3), lambda: make(way, **PLAIN), [case] * 3)
    with make(way, max_batch_size=2, **{**ROOMY, "max_num_tokens": 8}) as llm:
        engine, head = llm.engine, watch(llm, expected.answers)
        (gone,) = engine.add_request(case.prompt, case.params)
        engine.step()
        assert gone.kv.committed == 8
        engine.abort(gone.request_id)
        (other,) = engine.add_request(case.prompt, case.params)
        other.reuses_prefix = False
        while engine.has_work:
            engine.step()
        run, seen = run_watched(llm, [case])
        assert run.outcomes == expected.outcomes[:1]
        assert first_wrong_draft(head, seen, expected.log(True)) is None
        assert engine.stats.prefix_hit_tokens == 36


@pytest.mark.parametrize("way", EACH, ids=str)
def test_samples_of_one_prompt(targets: Callable[[int], Path], make: Make, way: Way) -> None:
    """Samples of one prompt share its blocks as far as these depend on nothing else. Each goes on with its own seed."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=7, ignore_eos=True)
    cases = [*draw_cases(2, seed=9, most_prompt=40), *(Case(BASE[:n], params) for n in (1, 8, 9, 10, 11, 12, 13))]
    single = [
        Case(case.prompt, dataclasses.replace(case.params, seed=sample_seed(case.params.seed or 0, i)))
        for case in cases
        for i in range(3)
    ]
    expected = refer(targets(way.modules), lambda: make(way.inside, **PLAIN), single)
    with make(way, max_batch_size=8, **TIGHT) as llm:
        samples = [Case(case.prompt, dataclasses.replace(case.params, n=3)) for case in cases]
        assert_right(llm, expected, told=False, cases=samples)


def drafts_of(llm: LLM) -> tuple[dict[Place, int], list[Outcome]]:
    """Return the drafts that requests were given to verify, and the outcomes."""
    run, seen = run_watched(llm, CASES)
    return seen.given, run.outcomes


def test_with_one_module_and_one_draft_all_modes_draft_the_same(make: Make) -> None:
    ways = (Way(1, 1), Way(1, 1, one_engine=False), Way(1, 1, vanilla=True))
    given = []
    for way in ways:
        with make(way, max_batch_size=4, **ROOMY) as llm:
            given.append(drafts_of(llm))
    assert len(given[0][0]) > 50
    assert given[1] == given[0]
    assert given[2] == given[0]


@pytest.mark.parametrize("k", [2, 5])
def test_one_module_inside_the_target_and_next_to_it_draft_the_same(make: Make, k: int) -> None:
    given = []
    for one_engine in (True, False):
        with make(Way(1, k, one_engine), max_batch_size=4, **ROOMY) as llm:
            given.append(drafts_of(llm))
    assert len(given[0][0]) > 50
    assert given[1] == given[0]


def test_the_module_next_to_the_target_is_the_first_of_several(make: Make) -> None:
    """The module next to the target is the first of several, if the mode is MTP_EAGLE.

    Otherwise several modules make one draft each.
    """
    with make(Way(2, 2, vanilla=True), **PLAIN) as llm:
        each = log_plainly(llm, watch(llm), CASES)
    with make(Way(2, 2, one_engine=False), max_batch_size=4, **ROOMY) as llm:
        given, _ = drafts_of(llm)
    first = {place: draft for place, draft in given.items() if place[1] == place[2]}
    assert len(first) > 50
    assert first == {place: each[place][1] for place in first}
    assert any(draft != each[place][1] for place, draft in given.items())


@pytest.mark.parametrize("way", [WAYS[2], EACH[0]], ids=str)
def test_modules_are_quantised_as_the_target_is(targets: Callable[[int], Path], make: Make, way: Way) -> None:
    """Modules are quantised as the target is, unless speculation says otherwise.

    The lm_head, which is the target's, is not.
    """
    with LLM(targets(way.modules), quantization="int8", enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = run_alone(llm.engine, CASES)
    with make(way, quantization="int8", max_batch_size=8, **TIGHT) as llm:
        head = step_of(llm).worker.head
        linears = {name: part.weight.dtype for name, part in head.named_modules() if isinstance(part, Linear)}
        assert {dtype for name, dtype in linears.items() if name.startswith("mtp.")} == {torch.int8}
        assert linears["head"] == torch.float32
        run, _ = run_watched(llm, CASES)
        assert run.outcomes == outcomes


def test_tensorrt_runs_one_module(targets: Callable[[int], Path]) -> None:
    config = EngineConfig(backend="tensorrt", num_kv_blocks=8)
    with pytest.raises(
        UnsupportedError, match=r"MTP with 2 modules on backend tensorrt: .*KV cache.*num_speculative_tokens=1"
    ):
        plan_build(targets(2), SpeculativeConfig(method="mtp"), config)
    assert plan_build(targets(2), SpeculativeConfig(method="mtp", num_speculative_tokens=1), config).mode == "MTP"


@pytest.mark.long
def test_onnx_graphs_keep_what_modules_put_out_in_the_caches_own_memory(
    targets: Callable[[int], Path], make: Make, tmp_path: Path
) -> None:
    """ONNX graphs write the modules' states into the cache's own memory.

    Graphs change no tensor. The new states of a cache are outputs, and the runtime writes them to the cache's memory.
    """
    way = EACH[1]
    limits: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 32, "block_size": 4}
    wanted = SpeculativeConfig(method="mtp", vanilla=True, num_speculative_tokens=way.K)
    build_engine(targets(way.modules), tmp_path / "engine", wanted, EngineConfig(backend="onnx", **limits))
    with make(way, num_kv_blocks=41, **limits) as llm:
        eager = run_together(llm.engine, CASES)
    with LLM(tmp_path / "engine", num_kv_blocks=41) as llm:
        run = run_together(llm.engine, CASES)
        executable = llm.engine.executables[0].inner
    assert run.outcomes == eager.outcomes
    assert run.speculation == eager.speculation
    ours = {tensor.data_ptr() for tensor in executable._flat_kv}
    for graph in executable._graphs:
        addresses = [value.data_ptr() for value in graph.run.__self__.binding.get_outputs()]
        passes = 2 + 1 + 2 * (way.K - 1)  # the target's layers; the first module; others, also over drafts
        assert sum(address in ours for address in addresses) == 2 * (passes + way.K - 1)
