"""Draft heads next to the target: outputs are those of plain decoding, drafts those of the head inside the target.

The reference is the log of the head inside the target (head_cases.log_plainly). The head next to the target must make
each draft from the very same bits. That holds for every kind of head, at any K, under chunks, shared prefixes, samples,
preemption and gaps in speculation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.head_cases import (
    ROOMY,
    TIGHT,
    Make,
    Reference,
    assert_right,
    chunks_of,
    first_wrong_draft,
    inside,
    maker,
    refer,
    run_watched,
    watch,
)
from tests.e2e.tiny import Case, Outcome, draw_cases
from tests.head_checkpoints import make_eagle, make_eagle3
from trtspec import SamplingParams
from trtspec.engine.propose import READ_ROWS
from trtspec.sampling_params import sample_seed

K = 3
CASES = draw_cases(16, seed=27, most_prompt=60)


@pytest.fixture(scope="module", params=["eagle3", "eagle"])
def make(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Make:
    """Make an LLM, as head_cases.maker explains. The head is next to the target unless a test asks for it inside."""
    folder = tmp_path_factory.mktemp("heads")
    if request.param == "eagle3":
        head = make_eagle3(folder, target, (0, 1), (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8))
    else:
        head = make_eagle(folder, target, num_hidden_layers=2, fc_bias=True, embedding="own")
    return maker(target, {"method": request.param, "model": str(head), "one_engine": False})


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[], Reference]:
    return functools.cache(lambda: refer(target, lambda: inside(make), CASES))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_every_draft_length(make: Make, reference: Callable[[], Reference], k: int) -> None:
    """Every draft length works in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position, and requests end inside a draft.
    """
    with make(k, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        run = assert_right(llm, reference(), told=True)
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


def test_the_heads_own_drafts(make: Make, reference: Callable[[], Reference]) -> None:
    with make(K, max_batch_size=8, **TIGHT) as llm:
        run = assert_right(llm, reference(), told=False)
        assert 0 < run.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("rows", [1, 5, pytest.param(17, marks=pytest.mark.long)])
def test_chunks_of_prompts(make: Make, reference: Callable[[], Reference], rows: int) -> None:
    """After each step, draft KV covers the prefilled part of a prompt. The hidden states of that part are not kept."""
    with make(K, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        assert_right(llm, reference().first(8), told=True)
        assert most() == rows


def test_launches_of_limited_size(make: Make, reference: Callable[[], Reference]) -> None:
    """Rows that waited while no request speculated are more than fit into a launch."""
    with make(K, max_batch_size=4, **{**ROOMY, "max_num_tokens": 16}) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: K if engine.stats.steps % 11 == 10 else 0  # type: ignore[method-assign]
        assert_right(llm, reference(), told=True)


def test_shared_prefixes(target: Path, make: Make) -> None:
    """Draft KV of a position depends on the token after it, so the last shared block is computed again."""
    base = [1 + i * i % 14 for i in range(42)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(base, params), *(Case([*base[: 4 * n], 15, 15 - n, *base[:5]], params) for n in range(0, 11, 2))]
    expected = refer(target, lambda: inside(make), cases)
    with make(K, **ROOMY) as llm:
        head = watch(llm, expected.answers)
        for i, case in enumerate(cases):  # one after the other
            run, seen = run_watched(llm, [case])
            assert run.outcomes == expected.outcomes[i : i + 1]
            assert first_wrong_draft(head, seen, expected.log(True)) is None
            assert not seen.incomplete
        assert llm.engine.stats.prefix_hit_tokens == sum(4 * max(n - 1, 0) for n in range(0, 11, 2))


@pytest.mark.parametrize("why", ["context", "request", "room", "load"])
def test_prefixes_are_shared_and_states_bounded_where_nobody_drafts(make: Make, why: str) -> None:
    """The head reads on only if drafts may come back with the load. Then it reads many rows at once."""
    own: dict[str, dict[str, int]] = {
        "request": {"max_draft_len": 0},
        "room": {"max_tokens": 2},
        "load": {"max_tokens": 150},
    }
    params = SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **own.get(why, {})})
    with make(
        K, {"max_model_len": 20} if why == "context" else {}, max_batch_size=4, **{**ROOMY, "max_num_tokens": 16}
    ) as llm:
        proposer = llm.engine.loop.proposer
        if why == "load":
            proposer.draft_len = lambda scheduler: 0  # type: ignore[method-assign]
        drafter, states = proposer.drafter, proposer.states
        assert drafter is not None
        assert states is not None
        calls, propose = [], drafter.propose
        drafter.propose = lambda asked: calls.append(len(asked)) or propose(asked)  # type: ignore[func-returns-value, method-assign]
        kept = []
        for _ in range(2):
            llm.engine.add_request([1 + i * i % 14 for i in range(42)], params)
            while llm.engine.has_work:
                llm.engine.step()
                kept.append(sum(len(part) for chunks in states._chunks.values() for _, part in chunks))
        assert llm.engine.stats.prefix_hit_tokens == 36  # the last whole block is computed again
        # chunks of a prompt, then every 64 rows
        assert len(calls) == {"load": 3 + 2 + 1 + 2, "room": 3 + 1}.get(why, 0)
        assert max(kept) <= (READ_ROWS if calls else 0)


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 6}, {"max_tokens": 6, "max_draft_len": 0}, {"max_tokens": 1}], ids=str
)
def test_samples_share_a_prompt_that_is_not_published(make: Make, limits: dict[str, int]) -> None:
    with make(K, enable_prefix_caching=False, **ROOMY) as llm:
        rows = []
        schedule = llm.engine.loop.scheduler.schedule
        llm.engine.loop.scheduler.schedule = lambda: rows.append(batch := schedule()) or batch  # type: ignore[func-returns-value, method-assign]
        params = SamplingParams(**{"n": 3, "seed": 1, "ignore_eos": True, **limits})
        llm.generate([[1 + i * i % 14 for i in range(42)]], params, use_tqdm=False)
        assert sum(row.num_rows for batch in rows for row in batch or () if row.is_context) == 42 + 2 * (42 - 40)


def test_samples_of_one_prompt(target: Path, make: Make) -> None:
    """Samples of one prompt share the blocks for which there is draft KV. Each goes on with its own seed."""
    cases = draw_cases(8, seed=9, most_prompt=40)
    seeds = [[sample_seed(c.params.seed or 0, i) for i in range(3)] for c in cases]
    single = [
        Case(c.prompt, dataclasses.replace(c.params, seed=s)) for c, own in zip(cases, seeds, strict=True) for s in own
    ]
    expected = refer(target, lambda: inside(make), single)
    with make(K, max_batch_size=8, **TIGHT) as llm:
        assert_right(
            llm, expected, told=False, cases=[Case(c.prompt, dataclasses.replace(c.params, n=3)) for c in cases]
        )


def test_who_stops_speculating_goes_on(make: Make, reference: Callable[[], Reference]) -> None:
    """A request that stops speculating goes on, and its hidden states are no longer kept."""
    expected = reference()
    with make(K, **ROOMY) as llm:
        requests = [request for case in CASES for request in llm.engine.add_request(case.prompt, case.params)]
        for _ in range(6):
            llm.engine.step()
        for request in requests[::2]:
            request.speculates = False
        while llm.engine.has_work:
            llm.engine.step()
        assert [Outcome.of(request) for request in requests] == expected.outcomes
        states = llm.engine.loop.proposer.states
        assert states is not None
        assert not states._chunks
