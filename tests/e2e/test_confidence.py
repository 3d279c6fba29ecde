"""Drafts cut where the draft layers hold them to be unlikely: fewer rows are verified, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.async_stand_in import HostQueue
from tests.contract.modes import LIMITS, RECIPES, TIGHT, Models
from tests.e2e.tiny import Run, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.core import StepInputs, StepOutputs
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
    """The contract's models, with fewer requests, among which are long ones."""
    models = Models(tmp_path_factory.mktemp("models"))
    models.cases = models.cases[4:28]
    return models


def run(models: Models, mode: M, threshold: float, backend: str = "eager") -> Run:
    """Run all cases at once in a cache too small for them, and compare their outcomes with plain decoding's."""
    recipe = RECIPES[mode]
    speculation: dict[str, Any] = {**recipe.speculation(models, K), THRESHOLD: threshold}
    folder, options = models.folder(recipe.target), {"backend": backend, "dtype": "float32", **LIMITS}
    if backend in ("aoti", "onnx"):
        engine = models.root / f"{backend} {mode.name} {threshold}"
        build_engine(folder, engine, read_speculative_config(speculation), EngineConfig(**options))
        folder, speculation, options = engine, {}, {}
    with LLM(folder, speculation or None, **options, **TIGHT) as llm:
        found = run_together(llm.engine, models.cases)
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.drafter_failures == 0
    assert found.outcomes == models.plain(recipe.target, "eager" if backend == "cuda" else backend)
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, id=mode.name, marks=() if mode in QUICK else pytest.mark.long) for mode in JUDGED],
)
def test_no_token_changes(models: Models, mode: M) -> None:
    """No draft changes a token. Probabilities lie on both sides of the threshold, and drafts are right and wrong."""
    all_of_them, found = run(models, mode, 0.0), run(models, mode, 0.02)
    assert 0 < found.speculation.num_draft_tokens < all_of_them.speculation.num_draft_tokens
    assert 0 < found.speculation.acceptance_per_position[0] < 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_a_graph_cuts_the_same_drafts(models: Models, backend: str) -> None:
    wanted, found = run(models, M.EAGLE3_ONE_MODEL, 0.02), run(models, M.EAGLE3_ONE_MODEL, 0.02, backend)
    assert found.speculation.num_draft_tokens == wanted.speculation.num_draft_tokens
    assert found.speculation.num_accepted_tokens == wanted.speculation.num_accepted_tokens


def test_last_layer_and_logits_are_computed_for_rows_that_are_read(models: Models) -> None:
    """A request with few drafts has few rows, in batches with contexts too."""
    recipe, sizes, ran = RECIPES[M.EAGLE3_ONE_MODEL], [], {"before": list[int](), "last": list[int](), "logits": []}
    speculation = {**recipe.speculation(models, K), THRESHOLD: 0.02}
    with LLM(models.folder(recipe.target), speculation, backend="eager", dtype="float32", **LIMITS, **TIGHT) as llm:
        executable = llm.engine.loop.target
        decoder = executable.inner.step.decoder
        watched = {"before": decoder.layers[-2].mlp, "last": decoder.layers[-1].mlp, "logits": decoder.head}
        for name, module in watched.items():
            module.register_forward_hook(lambda _, inputs, __, name=name: ran[name].append(len(inputs[0])))
        launch = executable.run

        def run(inputs: StepInputs) -> StepOutputs:
            spec = inputs.spec
            sizes.append((len(inputs.input_ids), spec.batch_size + int(spec.draft_lens.sum()), spec.runtime_draft_len))
            return launch(inputs)

        executable.run = run
        run_together(llm.engine, models.cases)
    assert ran["before"] == [rows for rows, _, _ in sizes]
    assert ran["last"] == ran["logits"] == [drawn for _, drawn, _ in sizes]
    assert any(rows > drawn and drafts for rows, drawn, drafts in sizes)


def test_a_threshold_of_one_cuts_all(models: Models) -> None:
    assert run(models, M.EAGLE3_ONE_MODEL, 1.0).speculation.num_draft_tokens == 0


def test_overlap_leaves_nothing_to_save(models: Models, work: HostQueue, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU the rows of a step are laid out before its drafts are known. A warning says that a threshold costs."""
    found = run(models, M.EAGLE3_ONE_MODEL, 0.02, "cuda")
    assert found.speculation.num_draft_tokens > 0
    assert "draft_confidence_threshold=0.02 loses accepted drafts and saves nothing" in caplog.text


def test_a_draft_model_of_its_own_is_refused(models: Models) -> None:
    speculation = {**RECIPES[M.DRAFT_TARGET].speculation(models, K), "one_engine": False, THRESHOLD: 0.5}
    with pytest.raises(UnsupportedError, match=rf"{THRESHOLD}=0\.5 with a draft model in an engine of its own"):
        LLM(models.folder("target"), speculation, backend="eager")


@pytest.mark.parametrize("mode", [M.NGRAM, M.SUFFIX, M.USER_PROVIDED], ids=lambda mode: mode.name)
def test_methods_without_probabilities_refuse_it(models: Models, mode: M) -> None:
    speculation = {**RECIPES[mode].speculation(models, K), THRESHOLD: 0.5}
    with pytest.raises(ConfigError, match=rf"{THRESHOLD}=0\.5 means nothing to method"):
        LLM(models.folder("target"), speculation, backend="eager")
