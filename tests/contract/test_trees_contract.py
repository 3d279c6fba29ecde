"""Draft trees of every mode that has them, with 40 requests; `make contract-trees` runs 200, and engines of aoti."""

from __future__ import annotations

import pytest

from tests.contract.run_trees import table
from tests.contract.trees import MODES, Trees
from trtspec.modes import SpeculativeDecodingMode as M


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("trees"), 40)


CELLS = [
    *((mode, "float32", 8) for mode in MODES),
    (M.EAGLE3_ONE_MODEL, "bfloat16", 1),
    *(pytest.param(mode, "bfloat16", 8, marks=pytest.mark.long) for mode in MODES),
]


@pytest.mark.parametrize(("mode", "dtype", "batch"), CELLS)
def test_ids_are_those_of_plain_decoding(trees: Trees, mode: M, dtype: str, batch: int) -> None:
    cell = trees.check(mode, "eager", dtype, batch)
    assert cell.verdict == "holds"
    assert f"| `{mode.name}` | eager | {dtype} | {batch} | {cell.acceptance[0]:.2f}, " in table([cell])
