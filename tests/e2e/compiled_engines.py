"""Compiled engines of each mode, built when first asked for, and functions that damage their folders and inputs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conformance import CASES, LIMITS, make_models
from tests.e2e.conformance import build as build_folder
from tests.e2e.tiny import Outcome, run_alone
from trtspec import LLM
from trtspec.core import StepInputs

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(mode, dtype) -> an engine folder, built when first asked for.

    The mode "scheduled" is eagle3 with a schedule of draft lengths.
    """

    @functools.cache
    def build(mode: str, dtype: str) -> Path:
        output = tmp_path_factory.mktemp("engines") / f"{mode}-{dtype}"
        mode, schedule = asked(mode)
        return build_folder(models, output, "aoti", mode, dtype, schedule)

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


def asked(mode: str) -> tuple[str, bool]:
    """Return the mode for conformance.build, and whether the engine has its schedule of draft lengths."""
    return ("eagle3", True) if mode == "scheduled" else (mode, False)


@pytest.fixture
def copy(engine: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """An engine folder that a test may damage."""
    return shutil.copytree(engine("ngram", "float32"), tmp_path / "engine")


def edited(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_other_kernels(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    edited(folder, executables={role: {**facts, "kernels": "0" * 16} for role, facts in data["executables"].items()})


SHAPE = ("--random-prompts", "--batch", "2", "--input-len", "8", "--output-len", "16")


def in_spec(inputs: StepInputs, **changes: object) -> StepInputs:
    return replace(inputs, spec=replace(inputs.spec, **changes))
