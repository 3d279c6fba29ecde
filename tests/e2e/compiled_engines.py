"""Compiled engines of each mode, built when first asked for, and functions that damage their folders and inputs.

Their models have two layers and make two drafts, the smallest numbers with more than one of each in a graph.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import conformance
from tests.e2e.conformance import CASES, LIMITS, TIGHT, packed
from tests.e2e.tiny import Outcome, run_alone
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.core import StepInputs
from trtspec.interop.reading import read_speculative_config

K = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conformance.make_models(tmp_path_factory.mktemp("models"), num_layers=2)


def speculation(mode: str, models: Path) -> dict[str, Any] | None:
    """The speculation of conformance.speculation with K drafts. The mode "scheduled" is eagle3 with a schedule of K."""
    found = conformance.speculation("eagle3" if mode == "scheduled" else mode, models)
    if found is None or "num_speculative_tokens" not in found:
        return found
    found |= {"num_speculative_tokens": K, "draft_len_schedule": {5: K, 7: 1} if mode == "scheduled" else None}
    return found


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(mode, dtype) -> an engine folder, built when first asked for."""

    @functools.cache
    def build(mode: str, dtype: str) -> Path:
        output = tmp_path_factory.mktemp("engines") / f"{mode}-{dtype}"
        config = EngineConfig(backend="aoti", dtype=dtype, **LIMITS)
        build_engine(models / "target", output, read_speculative_config(speculation(mode, models)), config)
        return output

    return build


@pytest.fixture(scope="module")
def plain(engine: Callable[[str, str], Path], models: Path) -> Callable[[str, str], list[Outcome]]:
    """(backend, dtype) -> the outcomes of plain decoding for CASES, one case at a time."""

    @functools.cache
    def outcomes(backend: str, dtype: str) -> list[Outcome]:
        if backend == "aoti":
            llm = LLM(engine("none", dtype), num_kv_blocks=128)
        else:
            llm = LLM(models / "target", dtype=dtype, num_kv_blocks=128, **LIMITS)
        return run_alone(llm.engine, CASES)

    return outcomes


def assert_speculation_changes_nothing(llm: LLM, plain: list[Outcome], mode: str) -> None:
    """Check packed runs against plain decoding of each case alone. Drafts are right now and then at both positions."""
    run = packed(llm)
    assert run.outcomes == plain
    if mode != "none":
        assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)
        assert len(run.speculation.acceptance_per_position) == K


def assert_words_are_those_of_eager(engine: Path, models: Path, mode: str, plain: list[Outcome]) -> None:
    """Check that an fp32 engine and eager return the same ids and accept the same drafts.

    plain: eager's outcomes of plain decoding, each case alone.
    """
    compiled = packed(LLM(engine, **TIGHT))
    eager = packed(LLM(models / "target", speculation(mode, models), **LIMITS, **TIGHT))
    assert compiled.outcomes == eager.outcomes == plain
    assert compiled.speculation == eager.speculation


@pytest.fixture
def copy(engine: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """An engine folder that a test may damage."""
    return shutil.copytree(engine("eagle3", "float32"), tmp_path / "engine")


def edited(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_other_kernels(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    edited(folder, executables={role: {**facts, "kernels": "0" * 16} for role, facts in data["executables"].items()})


SHAPE = ("--random-prompts", "--batch", "2", "--input-len", "8", "--output-len", "16")


def in_spec(inputs: StepInputs, **changes: object) -> StepInputs:
    return replace(inputs, spec=replace(inputs.spec, **changes))
