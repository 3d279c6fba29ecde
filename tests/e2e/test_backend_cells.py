"""Modes on backends: tests run every mode that a backend lists, here or in its own tests.

Others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.async_stand_in import HostQueue
from tests.contract.modes import LIMITS, RECIPES, Models
from tests.e2e.tensorrt_engines import cuda, kernels, trt
from tests.e2e.tiny import assert_all_blocks_free, run_together
from tests.tensorrt_stand_in import TensorRT
from trtspec import LLM, SamplingParams
from trtspec.backends.table import BACKENDS, Backend
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.errors import UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M

__all__ = ["cuda", "kernels", "trt"]  # fixtures
PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "build-engines.md"
K = 3
TIGHT = {"num_kv_blocks": 14}
CUDA = [mode for mode in RECIPES if BACKENDS["cuda"].lists(mode)]
QUICK = {M.MTP, M.EAGLE3, M.EAGLE3_ONE_MODEL, M.DRAFT_TARGET, M.NGRAM, M.MEDUSA, M.PARD}
TENSORRT = [mode for mode in RECIPES if BACKENDS["tensorrt"].lists(mode)]


def mode_name(mode: M) -> str:
    return mode.name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The contract's models, with fewer requests, among which are long ones."""
    models = Models(tmp_path_factory.mktemp("cells"))
    models.cases = models.cases[4:28]
    return models


def assert_right(models: Models, llm: LLM, mode: M, k: int) -> None:
    """Check that outcomes are those of eager plain decoding.

    The cache is too small for all requests. At every position, drafts are right now and then, and wrong now and then.
    """
    run = run_together(llm.engine, models.cases)
    assert llm.engine.loop.input_builder.mode is mode
    assert run.outcomes == models.plain(RECIPES[mode].target, "eager")
    assert llm.engine.stats.preemptions > 0
    assert llm.engine.stats.drafter_failures == 0
    accepted = run.speculation.acceptance_per_position
    assert len(accepted) == k
    assert all(0 < share < 1 for share in accepted)
    assert_all_blocks_free(llm)


@pytest.mark.filterwarnings("ignore:.*runs one MTP layer")
@pytest.mark.parametrize(
    "mode", [mode if mode in QUICK else pytest.param(mode, marks=pytest.mark.long) for mode in CUDA], ids=mode_name
)
def test_a_gpu_s_ids_are_those_of_eager_decoding(models: Models, work: HostQueue, mode: M) -> None:
    """On the stand-in for a GPU, every listed mode returns the ids of eager decoding."""
    with models.open(mode, K, "cuda", RECIPES[mode].target, debug=True, **TIGHT) as llm:
        assert_right(models, llm, mode, K)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*runs one MTP layer")
@pytest.mark.parametrize("mode", TENSORRT, ids=mode_name)
def test_a_plan_s_ids_are_those_of_eager_decoding(models: Models, trt: TensorRT, mode: M, tmp_path: Path) -> None:
    """On the stand-in for TensorRT, every listed mode returns the ids of eager decoding.

    MTP runs with one module, because modules that keep states in the cache are refused.
    """
    k = 1 if mode is M.MTP else K
    recipe = RECIPES[mode]
    asked, config = recipe.speculation(models, k), EngineConfig(backend="tensorrt", dtype="float32", **LIMITS, **TIGHT)
    inside = None if recipe.from_host else read_speculative_config(asked)
    build_engine(models.folder(recipe.target), tmp_path / "engine", inside, config)
    with LLM(tmp_path / "engine", asked if recipe.from_host else None) as llm:
        assert_right(models, llm, mode, k)


@pytest.mark.long
def test_a_plan_saves_the_states_of_eager_decoding(models: Models, trt: TensorRT, tmp_path: Path) -> None:
    saved = {}
    for backend in ("eager", "tensorrt"):
        fields = {"method": "extract_hidden_states", "output_directory": str(tmp_path / backend), "capture_layers": [1]}
        folder, limits = models.folder("target"), {**LIMITS, **TIGHT}
        if backend == "tensorrt":
            config = EngineConfig(backend=backend, dtype="float32", **limits)
            folder = build_engine(folder, tmp_path / "engine", read_speculative_config(fields), config).path
        with LLM(folder, *([fields] if backend == "eager" else []), **(limits if backend == "eager" else {})) as llm:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        (shard,) = (tmp_path / backend).glob("*.safetensors")
        saved[backend] = load_file(shard)
    for name, tensor in saved["eager"].items():
        torch.testing.assert_close(saved["tensorrt"][name], tensor)


# -- modes that are not listed -------------------------------------------------------------------------------------


def refused(row: Backend, mode: M) -> str | None:
    """Return the message with which a backend refuses a mode with one draft. None if it runs the mode."""
    try:
        row.check_mode(mode, 1)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mode", M, ids=mode_name)
@pytest.mark.parametrize("row", BACKENDS.values(), ids=lambda row: row.name)
def test_a_mode_that_no_test_has_run_is_refused_by_name(row: Backend, mode: M) -> None:
    """A backend refuses the modes it does not list, and its message names mode and backend.

    It lists all modes that do not shape graphs: their drafters run on the host, next to any graph.
    """
    words = refused(row, mode)
    assert (words is None) == (row.lists(mode) and not (row.causal and mode.drafts_in_blocks()))
    assert words is None or f"mode={mode.name} on backend {row.name}" in words
    assert row.lists(mode) or mode.shapes_graphs()


def test_the_remedy_names_backends_that_run_it() -> None:
    words = refused(BACKENDS["cuda"], M.DSPARK)
    assert words == ("mode=DSPARK on backend cuda is not verified; use another backend (eager, aoti), or another mode")


def test_a_mode_that_is_not_listed_is_not_built(models: Models) -> None:
    asked = read_speculative_config(RECIPES[M.DSPARK].speculation(models, K))
    with pytest.raises(UnsupportedError, match="mode=DSPARK on backend cuda is not verified"):
        plan_build(models.folder("target"), asked, EngineConfig(backend="cuda", num_kv_blocks=8))


def shown() -> Mapping[str, str]:
    """The page's table: backend -> the cell of its modes."""
    lines = (line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    return {cells[1].strip(" `"): cells[3] for cells in lines if cells[1].strip(" `") in BACKENDS and len(cells) == 6}


@pytest.mark.parametrize("row", BACKENDS.values(), ids=lambda row: row.name)
def test_the_page_shows_what_the_row_lists(row: Backend) -> None:
    """A cell's part before the first semicolon names the modes that the backend refuses.

    The rest says in what dtypes.
    """
    cell = shown()[row.name].partition(";")[0]
    assert cell.strip().startswith("all")
    assert set(re.findall(r"[A-Z][A-Z0-9_]{2,}", cell)) == {mode.name for mode in M if refused(row, mode)}
