"""Requests that ask for fewer drafts than the engine makes, or for none, get no more, and the same tokens."""

from __future__ import annotations

import dataclasses

import pytest

from tests.contract.modes import TIGHT, Models
from tests.e2e.tiny import Case, assert_all_blocks_free, run_together
from trtspec import SamplingParams
from trtspec.engine.row_states import RowStates
from trtspec.modes import SpeculativeDecodingMode as M

K = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models whose request i asks for the i % 6-th of six draft lengths. The last of the six sets none."""
    made = Models(tmp_path_factory.mktemp("modes"))
    wanted = (0, 1, 2, 3, 9, None)
    made.cases = [
        Case(case.prompt, dataclasses.replace(case.params, max_draft_len=wanted[i % 6]))
        for i, case in enumerate(made.cases[:30])
    ]
    return made


@pytest.mark.parametrize("mode", [M.NGRAM, M.DRAFT_TARGET, M.EAGLE3_ONE_MODEL, M.EAGLE3, M.MTP, M.PARD])
def test_nobody_is_given_more_than_wanted_and_nothing_changes(models: Models, mode: M) -> None:
    target = "mimo of 5" if mode is M.MTP else "target"
    with models.open(mode, K, "eager", target, **TIGHT) as llm:
        run = run_together(llm.engine, models.cases)
        assert_all_blocks_free(llm)
        assert llm.engine.stats.drafter_failures == 0
    assert run.outcomes == models.plain(target, "eager")
    for request, case in zip(run.requests, models.cases, strict=True):
        wanted = K if case.params.max_draft_len is None else min(case.params.max_draft_len, K)
        offered = {draft_len for _, draft_len in request.stats.outcomes}
        assert max(offered, default=0) <= wanted
    longest = [
        max((draft_len for request in run.requests[i::6] for _, draft_len in request.stats.outcomes), default=0)
        for i in range(6)
    ]
    assert longest == [0, 1, 2, 3, 3, 3]


@pytest.mark.parametrize("mode", [M.EAGLE3_ONE_MODEL, M.EAGLE3])
def test_no_drafts_are_made_where_nobody_wants_any(models: Models, mode: M) -> None:
    """No drafts are made if no request wants any, and no hidden states are kept for drafts."""
    with models.open(mode, K, "eager", "target") as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=12, max_draft_len=0, ignore_eos=True)
        requests = [engine.add_request([1, 2, 3], params)[0], engine.add_request([5, 6], params)[0]]
        while engine.has_work:
            engine.step()
            states = engine.loop.proposer.states
            assert states is None or not _kept(states)
        steps = len(requests[0].output_ids)
        assert [request.stats.outcomes for request in requests] == [{(1, 0): steps - 1}] * 2
        if mode is M.EAGLE3:
            assert engine.executables[1].launches == 0


def _kept(states: RowStates) -> bool:
    return any(states._chunks.values())
