"""sa_config: drafts that are looked up replace a model's where the text repeats itself, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.async_stand_in import HostQueue
from tests.contract.modes import LIMITS, RECIPES, TIGHT, Models
from tests.e2e.tiny import Run, assert_all_blocks_free, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.engine.step import StepLoop
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
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each request and step with drafts: whether they were looked up, and whether the first one was accepted."""
    seen: list[tuple[bool, bool]] = []
    emit = StepLoop.emit

    def watched(self: StepLoop, row: Any, num_tokens: int, drafts: Any, *others: Any) -> Any:
        if drafts:
            seen.append((row.request.looked_up, num_tokens > 1))
        return emit(self, row, num_tokens, drafts, *others)

    monkeypatch.setattr(StepLoop, "emit", watched)
    return seen


ALL_KINDS = {(looked_up, right) for looked_up in (False, True) for right in (False, True)}


def run(models: Models, mode: M, threshold: int, backend: str = "eager", **fields: Any) -> Run:
    """Run all cases at once in a cache too small for them, and compare their outcomes with plain decoding's."""
    recipe = RECIPES[mode]
    speculation = {**recipe.speculation(models, K), "sa_config": {"threshold": threshold}, **fields}
    folder, options = models.folder(recipe.target), {"backend": backend, "dtype": "float32", **LIMITS}
    if backend in ("aoti", "onnx"):
        engine = models.root / f"{backend} {mode.name} {threshold}"
        build_engine(folder, engine, read_speculative_config(speculation), EngineConfig(**options))
        folder, speculation, options = engine, {}, {}
    with LLM(folder, speculation or None, **options, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.drafter_failures == 0
        assert len(llm.engine.loop.proposer.lookups) == 0, "nothing is kept of requests that ended"
        assert_all_blocks_free(llm)
    assert found.outcomes == models.plain(recipe.target, "eager" if backend == "cuda" else backend)
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, id=mode.name, marks=() if mode in QUICK else pytest.mark.long) for mode in TAKERS],
)
def test_no_token_changes(models: Models, mode: M, verified: list[tuple[bool, bool]]) -> None:
    """Some drafts are looked up and others are not. Both are right at times and wrong at times."""
    run(models, mode, 2)
    assert set(verified) == ALL_KINDS


def test_a_schedule_limits_them(models: Models, verified: list[tuple[bool, bool]]) -> None:
    """Large batches have no drafts, looked up or not."""
    found = run(models, M.EAGLE3_ONE_MODEL, 2, draft_len_schedule={2: K, 3: 1})
    assert set(verified) == ALL_KINDS
    assert any(len(step) > 3 and not any(one.draft_len for one in step) for step in found.steps)


def test_a_gpus_host_waits_for_each_step(models: Models, work: HostQueue, verified: list[tuple[bool, bool]]) -> None:
    run(models, M.EAGLE3_ONE_MODEL, 2, "cuda")
    assert set(verified) == ALL_KINDS


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_graphs_verify_them(models: Models, backend: str, verified: list[tuple[bool, bool]]) -> None:
    run(models, M.EAGLE3_ONE_MODEL, 2, backend)
    assert set(verified) == ALL_KINDS


@pytest.mark.long
def test_an_engine_takes_them_when_it_starts(models: Models, verified: list[tuple[bool, bool]]) -> None:
    """They are not compiled in. Everything else of its speculation is."""
    engine = models.engine("target", "aoti", M.EAGLE3_ONE_MODEL, K)
    with LLM(engine, {"sa_config": {"threshold": 2}}, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
    assert found.outcomes == models.plain("target", "aoti")
    assert set(verified) == ALL_KINDS
    with pytest.raises(ConfigError, match=r"its own speculation; set nothing in .* but sa_config, or build"):
        LLM(engine, {"sa_config": {}, "num_speculative_tokens": 2})
