"""Drafts cut where the draft layers hold them to be unlikely: fewer rows are verified, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.modes import LIMITS, RECIPES, TIGHT, Models
from tests.e2e.tiny import Run, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import fields_of
from trtspec.methods.table import METHODS
from trtspec.modes import SpeculativeDecodingMode as M

K = 4
THRESHOLD = "draft_confidence_threshold"
JUDGED = [
    mode
    for mode, recipe in RECIPES.items()
    if THRESHOLD in fields_of(METHODS[recipe.fields["method"]]) and mode not in (M.DRAFT_TARGET, M.DSPARK)
]


QUICK = {M.MTP, M.EAGLE3, M.EAGLE3_ONE_MODEL, M.MEDUSA, M.PARD}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def run(models: Models, mode: M, threshold: float, backend: str = "eager") -> Run:
    """Run all cases at once in a cache too small for them, and compare their outcomes with plain decoding's."""
    recipe = RECIPES[mode]
    speculation: dict[str, Any] = {**recipe.speculation(models, K), THRESHOLD: threshold}
    folder, options = models.folder(recipe.target), {"backend": backend, "dtype": "float32", **LIMITS}
    if backend != "eager":
        engine = models.root / f"{backend} {mode.name} {threshold}"
        build_engine(folder, engine, read_speculative_config(speculation), EngineConfig(**options))
        folder, speculation, options = engine, {}, {}
    with LLM(folder, speculation or None, **options, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.drafter_failures == 0
    assert found.outcomes == models.plain(recipe.target, backend)
    return found


def offered(found: Run) -> set[int]:
    """Numbers of drafts that requests verified in a step."""
    return {emission.draft_len for step in found.steps for emission in step}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, id=mode.name, marks=() if mode in QUICK else pytest.mark.long) for mode in JUDGED],
)
def test_no_token_changes(models: Models, mode: M) -> None:
    """No draft changes a token. Probabilities lie on both sides of the threshold, and drafts are right and wrong."""
    found = run(models, mode, 0.02)
    assert offered(found) >= {0, 1, 2}
    assert 0 < found.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("backend", ["aoti", pytest.param("onnx", marks=pytest.mark.long)])
def test_a_graph_cuts_the_same_drafts(models: Models, backend: str) -> None:
    wanted, found = run(models, M.EAGLE3_ONE_MODEL, 0.02), run(models, M.EAGLE3_ONE_MODEL, 0.02, backend)
    assert found.speculation.num_draft_tokens == wanted.speculation.num_draft_tokens
    assert found.speculation.num_accepted_tokens == wanted.speculation.num_accepted_tokens


@pytest.mark.parametrize(("threshold", "lens"), [(0.0, K), (1.0, 0)])
def test_thresholds_that_cut_nothing_and_all(models: Models, threshold: float, lens: int) -> None:
    """Requests at their end are an exception: they have no room for drafts."""
    found = run(models, M.EAGLE3_ONE_MODEL, threshold)
    assert lens in offered(found)
    assert (found.speculation.num_draft_tokens == 0) == (threshold == 1.0)


def test_a_draft_model_of_its_own_is_refused(models: Models) -> None:
    speculation = {**RECIPES[M.DRAFT_TARGET].speculation(models, K), "one_engine": False, THRESHOLD: 0.5}
    with pytest.raises(UnsupportedError, match=rf"{THRESHOLD}=0\.5 with a draft model in an engine of its own"):
        LLM(models.folder("target"), speculation, backend="eager")


@pytest.mark.parametrize("mode", [M.NGRAM, M.SUFFIX, M.USER_PROVIDED], ids=lambda mode: mode.name)
def test_methods_without_probabilities_refuse_it(models: Models, mode: M) -> None:
    speculation = {**RECIPES[mode].speculation(models, K), THRESHOLD: 0.5}
    with pytest.raises(ConfigError, match=rf"{THRESHOLD}=0\.5 means nothing to method"):
        LLM(models.folder("target"), speculation, backend="eager")
