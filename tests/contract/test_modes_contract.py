"""Each mode of the table with one K and 20 requests.

`make contract` runs all K with 64 requests, on all backends.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.modes import RECIPES, WITHOUT_DRAFTS, Cell, Models, check
from tests.contract.run_modes import table
from trtspec.modes import SpeculativeDecodingMode as M

QUICK = {
    M.MTP,
    M.MTP_EAGLE,
    M.EAGLE3,
    M.DRAFT_TARGET_ONE_MODEL,
    M.SUFFIX,
    M.EAGLE_ONE_MODEL,
    M.MLP_SPECULATOR,
    M.DFLASH,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models = Models(tmp_path_factory.mktemp("modes"))
    del models.cases[:-20]
    return models


def test_every_mode_has_its_cells() -> None:
    assert {*RECIPES, *WITHOUT_DRAFTS} == {*M}


@pytest.mark.parametrize(
    "mode",
    [mode if mode in QUICK else pytest.param(mode, marks=pytest.mark.long) for mode in RECIPES],
    ids=lambda mode: mode.name,
)
def test_speculation_changes_nothing_and_nothing_is_lost(models: Models, mode: M) -> None:
    cell = check(models, mode, 3, "eager")
    assert cell.verdict == "holds"
    assert cell.acceptance_length > 1


def test_what_a_cell_would_say_of_a_drafter_that_is_never_wrong(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell whose drafter is never wrong does not hold, because such a run tests nothing of rewinding."""
    monkeypatch.setattr(models, "oracle", lambda: _always_right(models))
    cell = check(models, M.USER_PROVIDED, 2, "eager")
    assert cell.verdict.startswith("acceptance [1.0, ")


def _always_right(models: Models) -> object:
    oracle = Models.oracle(models)
    oracle.lie = oracle.shorten = 0.0
    return oracle


def test_the_table_tells_broken_cells(tmp_path: Path) -> None:
    cells = [
        Cell("NGRAM", 1, "eager", "holds", acceptance_length=1.25),
        Cell("NGRAM", 2, "eager", "3 outputs differ, the first is that of request 7"),
        Cell("NGRAM", 1, "onnx", "refused: no"),
    ]
    said = table(cells)
    assert "| `NGRAM` | eager | 1.25 | **3 outputs differ, the first is that of request 7** |  |  |  |" in said
    assert "| `NGRAM` | onnx | refused |  |  |  |  |" in said
    assert "- NGRAM on onnx is refused: no" in said
