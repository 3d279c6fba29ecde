"""Fixtures: stand-ins for TensorRT and CUDA, and engines of each mode that are built when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conformance import CASES, LIMITS, build, make_models
from tests.e2e.tiny import Outcome, run_alone
from tests.fake_tensorrt.plugins import fake_plugin_of
from tests.tensorrt_stand_in import CudaRuntime, TensorRT
from trtspec import LLM
from trtspec.backends.tensorrt import compile as tensorrt_compile
from trtspec.backends.tensorrt import executable as tensorrt
from trtspec.backends.tensorrt.cuda import Cuda


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cuda() -> CudaRuntime:
    return CudaRuntime()


@dataclass
class Built:
    """An engine folder, the plans in it, and the kernels that their networks call."""

    folder: Path
    plans: dict[bytes, Any]
    kernels: set[str]


@pytest.fixture
def kernels() -> set[str]:
    """Kernels of all networks that a test builds."""
    return set()


@pytest.fixture
def trt(cuda: CudaRuntime, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """Stand-ins that replace TensorRT, CUDA, and our plugins in TensorRT's registry."""
    found, gpu = TensorRT(cuda), Cuda(cuda)
    for module in (tensorrt, tensorrt_compile):
        monkeypatch.setattr(module, "load_tensorrt", lambda: found)
        monkeypatch.setattr(module, "open_cuda", lambda: gpu)
    monkeypatch.setattr(tensorrt_compile, "registered_plugins", lambda trt: fake_plugin_of)
    monkeypatch.setattr(
        tensorrt_compile, "check_kernels", lambda *model: kernels.update(tensorrt_compile.aot_kernels(*model))
    )
    return found


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, bool], Built]:
    """Engines of each (mode, schedule) that a test has asked for."""
    return {}


@pytest.fixture
def engine(
    trt: TensorRT,
    kernels: set[str],
    built: dict[tuple[str, bool], Built],
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """(mode, schedule=False) -> an engine folder in fp32, built when first asked for. A test changes a copy only."""

    def build_once(mode: str, schedule: bool = False) -> Path:
        if (mode, schedule) not in built:
            folder = tmp_path_factory.mktemp("engines") / mode
            build(models, folder, "tensorrt", mode, "float32", schedule)
            built[mode, schedule] = Built(folder, dict(trt.plans), set(kernels))
        trt.plans.update(built[mode, schedule].plans)
        return built[mode, schedule].folder

    return build_once


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    """Eager's outcomes of each case alone."""
    return run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)
