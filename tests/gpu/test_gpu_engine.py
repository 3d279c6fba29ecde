"""Engines on a GPU: the ids of eager decoding on the CPU, up to near-ties.

Ids stay the same whatever other requests run, however steps are launched, and whoever drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conformance import CASES, LIMITS, MODES, TIGHT, K, assert_speculation_changes_nothing, wishes
from tests.e2e.tiny import Outcome, run_together
from tests.gpu import engines
from tests.gpu.engines import DEMO, NEAR_TIES, WIDE, on_gpu
from trtspec import LLM

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16")
all_modes = pytest.mark.parametrize("mode", MODES)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def plain(models: Path) -> Callable[[str], list[Outcome]]:
    """dtype -> outcomes of plain decoding of CASES, each alone."""
    return functools.cache(lambda dtype: engines.alone(models / "target", CASES, dtype=dtype))


@all_dtypes
def test_words_are_eager_s(models: Path, plain: Callable[[str], list[Outcome]], dtype: str) -> None:
    engines.check_words_are_eager_s(models / "target", CASES, plain(dtype), NEAR_TIES[dtype], dtype=dtype)


@all_dtypes
@all_modes
def test_speculation_changes_nothing(
    models: Path, plain: Callable[[str], list[Outcome]], mode: str, dtype: str
) -> None:
    """60 mixed requests in a cache that is too small for them; at every position some drafts are right."""
    with on_gpu(models / "target", wishes(mode, models, False), dtype=dtype, **LIMITS, **TIGHT) as llm:
        assert_speculation_changes_nothing(llm, plain(dtype), mode)


@all_modes
def test_graphs_change_nothing(models: Path, mode: str) -> None:
    run = engines.check_graphs_change_nothing(
        models / "target", wishes(mode, models, False), CASES[:30], dtype="bfloat16"
    )
    assert len(run.steps) > 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["none", "eagle3"])
def test_any_order_changes_nothing(models: Path, mode: str, seed: int) -> None:
    engines.check_any_order_changes_nothing(
        models / "target", wishes(mode, models, False), CASES[:30], seed, dtype="bfloat16"
    )


@all_modes
def test_prefixes_are_found(models: Path, mode: str) -> None:
    engines.check_prefixes_are_found(models / "target", wishes(mode, models, False), dtype="bfloat16")


@all_modes
def test_chunks_change_nothing(models: Path, mode: str) -> None:
    engines.check_chunks_change_nothing(models / "target", wishes(mode, models, False), dtype="bfloat16")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@all_dtypes
def test_quantised_weights(models: Path, quantization: str, dtype: str) -> None:
    options = {"dtype": dtype, "quantization": quantization}
    cases = CASES[:20]
    theirs = engines.alone(models / "target", cases, **options)
    engines.check_words_are_eager_s(models / "target", cases, theirs, NEAR_TIES[f"{dtype} quantised"], **options)
    with on_gpu(models / "target", wishes("eagle3", models, False), **WIDE, **options) as llm:
        assert run_together(llm.engine, cases).outcomes == theirs


# -- the trained pair --------------------------------------------------------------------------------------------------


@all_dtypes
def test_the_demo(dtype: str) -> None:
    """Ids of 64 tokens, plain and with drafts of every kind, of which some are accepted at each position."""
    with LLM(DEMO / "target") as llm:
        cases = engines.demo_cases(llm, 64)
    plain = engines.alone(DEMO / "target", cases, dtype=dtype)
    engines.check_words_are_eager_s(DEMO / "target", cases, plain, NEAR_TIES[dtype], dtype=dtype)
    for mode in ("ngram", "draft", "eagle3"):
        with on_gpu(DEMO / "target", engines.demo_speculation(mode), dtype=dtype, **WIDE) as llm:
            run = run_together(llm.engine, cases)
        assert run.outcomes == plain, mode
        shares = run.speculation.acceptance_per_position
        assert len(shares) == K
        assert all(0 < share < 1 for share in shares), (mode, shares)


@pytest.mark.memcheck
def test_the_demo_with_graphs_and_without() -> None:
    """Prompts, drafts, draws and graphs, with the kernels that models of this kind use."""
    with LLM(DEMO / "target") as llm:
        cases = engines.demo_cases(llm, 12)
    engines.check_graphs_change_nothing(DEMO / "target", engines.demo_speculation("eagle3"), cases)
