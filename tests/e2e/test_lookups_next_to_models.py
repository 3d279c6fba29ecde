"""sa_config: drafts that are looked up replace a model's where the text repeats itself, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.modes import LIMITS, RECIPES, TIGHT, Models
from tests.e2e.tiny import Run, assert_all_blocks_free, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.engine.propose import Proposer
from trtspec.errors import ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import fields_of
from trtspec.methods.table import METHODS
from trtspec.modes import SpeculativeDecodingMode as M

K = 4
TAKERS = [mode for mode, recipe in RECIPES.items() if "sa_config" in fields_of(METHODS[recipe.fields["method"]])]
QUICK = {M.EAGLE3, M.EAGLE3_ONE_MODEL, M.MTP, M.DRAFT_TARGET}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The contract's models, with fewer requests, among which are long ones."""
    models = Models(tmp_path_factory.mktemp("models"))
    models.cases = models.cases[4:28]
    return models


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request and step with drafts: whether they were looked up."""
    seen: list[bool] = []
    propose = Proposer.propose

    def watched(self: Proposer, requests: Any, scheduler: Any) -> None:
        propose(self, requests, scheduler)
        seen.extend(request.looked_up for request in requests if request.drafts)

    monkeypatch.setattr(Proposer, "propose", watched)
    return seen


def run(models: Models, mode: M, threshold: int | None, backend: str = "eager", **fields: Any) -> Run:
    """Run all cases at once in a cache too small for them, and compare their outcomes with plain decoding's."""
    recipe = RECIPES[mode]
    speculation: dict[str, Any] = {**recipe.speculation(models, K), **fields}
    speculation |= {} if threshold is None else {"sa_config": {"threshold": threshold}}
    folder, options = models.folder(recipe.target), {"backend": backend, "dtype": "float32", **LIMITS}
    if backend in ("aoti", "onnx"):
        engine = models.root / f"{backend} {mode.name} {threshold}"
        build_engine(folder, engine, read_speculative_config(speculation), EngineConfig(**options))
        folder, speculation, options = engine, {}, {}
    with LLM(folder, speculation or None, **options, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.drafter_failures == 0
        assert_all_blocks_free(llm)
    assert found.outcomes == models.plain(recipe.target, backend)
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, id=mode.name, marks=() if mode in QUICK else pytest.mark.long) for mode in TAKERS],
)
def test_no_token_changes(models: Models, mode: M, replaced: list[bool]) -> None:
    """Some drafts are looked up and others are not. All drafts are right at times and wrong at times."""
    found = run(models, mode, 2)
    assert 0 < sum(replaced) < len(replaced)
    assert 0 < found.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("mode", [M.EAGLE3, M.EAGLE3_ONE_MODEL], ids=lambda mode: mode.name)
def test_no_token_changes_where_the_engine_chooses_the_number_of_drafts(
    models: Models, mode: M, replaced: list[bool]
) -> None:
    run(models, mode, 2, num_speculative_tokens="auto")
    assert 0 < sum(replaced) < len(replaced)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_graphs_verify_them(models: Models, backend: str, replaced: list[bool]) -> None:
    run(models, M.EAGLE3_ONE_MODEL, 2, backend)
    assert 0 < sum(replaced) < len(replaced)


@pytest.mark.long
def test_an_engine_takes_them_when_it_starts(models: Models, replaced: list[bool]) -> None:
    """They are not compiled in. Everything else of its speculation is."""
    engine = models.engine("target", "aoti", M.EAGLE3_ONE_MODEL, K)
    with LLM(engine, {"sa_config": {"threshold": 2}}, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
    assert found.outcomes == models.plain("target", "aoti")
    assert 0 < sum(replaced) < len(replaced)
    with pytest.raises(ConfigError, match=r"its own speculation; set nothing in .* but sa_config, or build"):
        LLM(engine, {"sa_config": {}, "num_speculative_tokens": 2})
