"""Backend tensorrt_rtx on stand-ins for TensorRT-RTX and CUDA: networks without plugins return eager's ids.

The stand-in computes each layer as documented. `make contract-tensorrt-rtx` builds such networks with the real builder.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from tests.contract.modes import RECIPES, Models
from tests.e2e.conformance import LIMITS
from tests.e2e.tensorrt_engines import cuda
from tests.e2e.tiny import assert_all_blocks_free, run_together
from tests.fake_tensorrt.builder import FakeConfig
from tests.tensorrt_stand_in import CudaRuntime, TensorRT
from trtspec import LLM
from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt import executable, rtx
from trtspec.backends.tensorrt.cuda import Cuda
from trtspec.backends.tensorrt.profiles import ARCHITECTURES, TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError, ConfigError, DependencyError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M

pytestmark = pytest.mark.slow

__all__ = ["cuda"]  # a fixture
K = 3
QUICK = (M.EAGLE3_ONE_MODEL,)
MODES = [mode for mode in RECIPES if BACKENDS["tensorrt_rtx"].lists(mode) and not mode.drafts_in_blocks()]
BOTH = TensorRTOptions(sm=(89, 120))


class RtxConfig(FakeConfig):
    """An IBuilderConfig of TensorRT-RTX, which builds for architectures."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def set_compute_capability(self, capability: Any, index: int) -> None:
        assert index < self.num_compute_capabilities
        self._architectures = [*self.__dict__.get("_architectures", []), capability.name]


class Rtx(TensorRT):
    """The module tensorrt_rtx."""

    ComputeCapability = IntEnum("ComputeCapability", {f"SM{one}": one for one in ARCHITECTURES})  # type: ignore[misc]

    @property
    def Builder(self) -> Any:
        class Builder(super().Builder):  # type: ignore[misc]
            def _create_builder_config(self) -> RtxConfig:
                return RtxConfig()

        return Builder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models = Models(tmp_path_factory.mktemp("rtx"))
    models.cases = models.cases[4:16]
    return models


@pytest.fixture
def trt(cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> Rtx:
    """The stand-ins, with a GPU of SM89."""
    found, gpu = Rtx(cuda), Cuda(cuda)
    monkeypatch.setattr(rtx, "load_rtx", lambda: found)
    for module in (rtx, executable):
        monkeypatch.setattr(module, "open_cuda", lambda: gpu)
    monkeypatch.setattr(gpu, "device", lambda: {"gpu": "Stand-in", "compute_capability": "8.9"})
    return found


def built(models: Models, mode: M, k: int, folder: Path, options: TensorRTOptions | None = BOTH) -> LLM:
    recipe = RECIPES[mode]
    asked = recipe.speculation(models, k)
    config = EngineConfig(backend="tensorrt_rtx", dtype="float32", **{**LIMITS, "max_seq_len": 96})
    inside = None if recipe.from_host else read_speculative_config(asked)
    build_engine(models.folder(recipe.target), folder, inside, config, options=options)
    return LLM(folder, asked if recipe.from_host else None)


@pytest.mark.filterwarnings("ignore:.*runs one MTP layer")
@pytest.mark.parametrize(
    "mode",
    [mode if mode in QUICK else pytest.param(mode, marks=pytest.mark.long) for mode in MODES],
    ids=lambda mode: mode.name,
)
def test_ids_are_those_of_eager_decoding(models: Models, trt: Rtx, mode: M, tmp_path: Path) -> None:
    """Requests are greedy and sampled, with every filter, alone and together.

    Modes whose layers draft in the launch have one draft.
    """
    k = 1 if mode.reads_hidden_states() or (mode.use_one_engine() and not mode.drafts_without_kv()) else K
    with built(models, mode, k, tmp_path / "engine") as llm:
        run = run_together(llm.engine, models.cases)
        assert run.outcomes == models.plain(RECIPES[mode].target, "eager")
        accepted = run.speculation.acceptance_per_position
        assert len(accepted) == k
        assert all(0 < share < 1 for share in accepted)
        assert_all_blocks_free(llm)
    for network, config in trt.plans.values():
        assert config._architectures == ["SM89", "SM120"]
        assert not any(type(layer).__name__ == "Plugin" for layer in network._layers)


def test_a_plan_for_other_cards_or_of_another_version_is_refused(
    models: Models, trt: Rtx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with built(models, M.NGRAM, K, tmp_path / "engine"):
        pass
    gpu = rtx.open_cuda()
    with monkeypatch.context() as change:
        change.setattr(gpu, "device", lambda: {"gpu": "Other", "compute_capability": "8.6"})
        with pytest.raises(CheckpointError, match=r"architectures 89, 120, this GPU has 86; .*--sm 86"):
            LLM(tmp_path / "engine")
    monkeypatch.setattr(type(trt), "__version__", "99.0")
    with pytest.raises(CheckpointError, match=r"built by TensorRT-RTX .*, this is 99\.0"):
        LLM(tmp_path / "engine")


@pytest.mark.parametrize("name", ["refit", "strip_plan", "version_compatible", "weight_streaming"])
def test_options_that_the_builder_does_not_take_are_refused_with_its_reason(
    models: Models, trt: Rtx, name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} with backend tensorrt_rtx: .*; leave it out"):
        built(models, M.NGRAM, K, tmp_path / "engine", TensorRTOptions(**{name: True}))


def test_what_has_no_layers_is_refused_by_name(models: Models, trt: Rtx, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sm = 90; TensorRT-RTX builds for 75"):
        TensorRTOptions(sm=(90,))
    with pytest.raises(ConfigError, match=r"sm = \(89, 120\): backend tensorrt builds for the GPU that is here"):
        plan_build(models.folder("target"), None, EngineConfig(backend="tensorrt", **LIMITS), options=BOTH)
    with pytest.raises(UnsupportedError, match="backend tensorrt_rtx: EAGLE3_ONE_MODEL with 3 drafts writes"):
        built(models, M.EAGLE3_ONE_MODEL, 3, tmp_path / "engine")
    config = EngineConfig(backend="tensorrt_rtx", dtype="float32", quantization="int4", **LIMITS)
    with pytest.raises(UnsupportedError, match="no layers for weights with a scale per group"):
        build_engine(models.folder("target"), tmp_path / "engine", None, config)


def test_a_plan_is_shown_without_the_builder(models: Models) -> None:
    plan = plan_build(models.folder("target"), None, EngineConfig(backend="tensorrt_rtx", **LIMITS))
    assert plan.executables["target"].plugins == ()
    assert plan.options is not None
    assert plan.options["attention"] == "native"
    assert plan.options["sm"] == (86, 89, 120)


def test_a_missing_builder_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "MODULES", ("no_such_module",))
    rtx.load_rtx.cache_clear()
    with pytest.raises(DependencyError, match=r"pip install 'trtspec\[tensorrt-rtx\]'"):
        rtx.require()
