"""TensorRT engines on a GPU: built, run, and compared with eager decoding. Skipped, with the reason, elsewhere.

These tests have not been run yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conformance import (
    CASES,
    LIMITS,
    MODES,
    TIGHT,
    assert_speculation_changes_nothing,
    build,
    make_models,
    wishes,
)
from tests.e2e.near_ties import first_gaps
from tests.e2e.tiny import Outcome, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.backends.tensorrt.cuda import Cuda
from trtspec.backends.tensorrt.executable import GENERATION, TensorRTExecutable, load_tensorrt
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import DependencyError
from trtspec.interop.reading import read_speculative_config

DEMO = Path(__file__).parents[2] / "examples" / "demo"
NEAR_TIE = 4.0
"""Ulps of bf16 by which another order of additions, in three layers, may change a logit."""

try:
    load_tensorrt()
    Cuda.open()
except DependencyError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """mode -> an engine of it in bf16."""
    return functools.cache(
        lambda mode: build(models, tmp_path_factory.mktemp("engines") / mode, "tensorrt", mode, "bfloat16")
    )


@pytest.fixture(scope="module")
def plain(engine: Callable[[str], Path]) -> list[Outcome]:
    return run_alone(LLM(engine("none"), **TIGHT).engine, CASES)


@pytest.mark.parametrize("mode", MODES)
def test_speculation_changes_nothing(engine: Callable[[str], Path], plain: list[Outcome], mode: str) -> None:
    llm = LLM(engine(mode), **TIGHT)
    assert isinstance(llm.engine.loop.target.inner, TensorRTExecutable)
    assert_speculation_changes_nothing(llm, plain, mode)


def test_it_differs_from_eager_in_near_ties_at_most(models: Path, plain: list[Outcome]) -> None:
    eager = LLM(models / "target", dtype="bfloat16", num_kv_blocks=128, **LIMITS)
    ours = run_alone(eager.engine, CASES)
    gaps = first_gaps(eager.engine, CASES, ours, plain)
    assert max(gaps.values(), default=0.0) <= NEAR_TIE


@pytest.mark.parametrize("mode", ["none", "ngram", "draft"])
def test_attention_of_tensorrts_own(models: Path, tmp_path: Path, mode: str) -> None:
    """With fp32 and a linear cache the ids are eager's."""
    config = EngineConfig(backend="tensorrt", dtype="float32", **LIMITS)
    speculation = read_speculative_config(wishes(mode, models, False))
    options = TensorRTOptions(attention="native")
    build_engine(models / "target", tmp_path / "engine", speculation, config, options=options)
    run = run_together(LLM(tmp_path / "engine").engine, CASES)
    assert run.outcomes == run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)


def test_the_demo(tmp_path: Path) -> None:
    """EAGLE3 on the trained pair: the ids of plain decoding, several tokens a step, generations by CUDA graphs."""
    config = EngineConfig(backend="tensorrt", max_batch_size=4, max_seq_len=256)
    speculation = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 3}
    build_engine(DEMO / "target", tmp_path / "plain", None, config)
    build_engine(DEMO / "target", tmp_path / "eagle3", read_speculative_config(speculation), config)
    prompts = ["def read_config(filename):\n", "class Stack:\n", "import os\n\n\ndef "]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=64)
    texts = {}
    for mode in ("plain", "eagle3"):
        with LLM(tmp_path / mode) as llm:
            texts[mode] = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            if mode == "eagle3":
                assert llm.engine.stats.speculation.acceptance_length > 2
                plan = llm.engine.loop.target.inner._graphs[0].run.__self__
                assert plan.contexts[GENERATION] is not None
    assert texts["plain"] == texts["eagle3"]
