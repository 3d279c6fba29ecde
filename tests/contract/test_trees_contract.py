"""Draft trees of every mode that has them, with 20 requests.

`make contract-trees` runs 200, and engines of aoti and onnx.
"""

from __future__ import annotations

import pytest

from tests.contract.run_trees import table
from tests.contract.trees import DYNAMIC, MODES, Trees
from trtspec.modes import SpeculativeDecodingMode as M


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    trees = Trees(tmp_path_factory.mktemp("trees"), 160)
    del trees.cases[:140]  # the others fill the cache, so that some are preempted in every mode
    return trees


TWINS = [(mode, M[f"{mode.name}_ONE_MODEL"]) for mode in MODES if f"{mode.name}_ONE_MODEL" in M.__members__]
"""Modes that draft in two engines and in one. The first of each has static trees here, and the other dynamic ones."""

EVERY = [*((mode, "static") for mode in MODES), *((mode, "dynamic") for mode in DYNAMIC)]
ELSEWHERE = {(two, "dynamic") for two, _ in TWINS} | {(one, "static") for _, one in TWINS}
CELLS = [
    *(pytest.param(*one, "float32", 8, marks=[pytest.mark.long] if one in ELSEWHERE else []) for one in EVERY),
    (M.EAGLE3_ONE_MODEL, "dynamic", "bfloat16", 1),
    pytest.param(M.EAGLE3_ONE_MODEL, "static", "bfloat16", 1, marks=pytest.mark.long),
    *(pytest.param(*one, "bfloat16", 8, marks=pytest.mark.long) for one in EVERY),
]


@pytest.mark.parametrize(("mode", "shape", "dtype", "batch"), CELLS)
def test_ids_are_those_of_plain_decoding(trees: Trees, mode: M, shape: str, dtype: str, batch: int) -> None:
    cell = trees.check(mode, shape, "eager", dtype, batch)
    assert cell.verdict == "holds"
    assert f"| `{mode.name}` | {shape} | eager | {dtype} | {batch} | {cell.acceptance[0]:.2f}, " in table([cell])


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "shape"), [(M.MEDUSA, "static"), (M.EAGLE3_ONE_MODEL, "dynamic"), (M.DRAFT_TARGET, "static")]
)
def test_ids_in_onnx_runtime(trees: Trees, mode: M, shape: str) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'trtspec[onnx]'")
    assert trees.check(mode, shape, "onnx", "float32", 8).verdict == "holds"
