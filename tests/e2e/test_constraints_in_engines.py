"""Penalties, biases and logprobs in engines of AOTInductor's graphs and of ONNX graphs.

Ids and logprobs are those of plain decoding on the same backend, bit for bit. The ids are also those of eager.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.modes import ROOMY, TIGHT, Models
from tests.e2e.tiny import Outcome, assert_all_blocks_free, run_together, with_constraints
from trtspec.modes import SpeculativeDecodingMode as M

K = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = Models(tmp_path_factory.mktemp("modes"))
    made.cases = with_constraints(made.cases)
    return made


def said(models: Models, mode: M, backend: str, **options: Any) -> tuple[list[Outcome], list[Any]]:
    """Return the outcome of every request and its logprobs."""
    with models.open(mode, K, backend, "target", **options) as llm:
        run = run_together(llm.engine, models.cases)
        assert_all_blocks_free(llm)
        if mode is not M.NONE:
            assert llm.engine.stats.preemptions
            assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)
    return run.outcomes, [None if one.logprobs is None else one.logprobs.entries for one in run.requests]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["onnx", "aoti"])
def test_the_words_are_those_of_plain_decoding(models: Models, backend: str) -> None:
    outcomes, logprobs = said(models, M.NONE, backend, **ROOMY)
    assert outcomes == models.plain("target", "eager")
    for mode in (M.NGRAM, M.EAGLE3_ONE_MODEL):
        assert said(models, mode, backend, **TIGHT) == (outcomes, logprobs)
