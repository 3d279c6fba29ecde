"""Calls to TensorRT's builder, recorded by a stand-in with its signatures, and errors where nothing can be built."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from trtspec_plugins.tensorrt import build as kernels
from trtspec_plugins.tensorrt.device import architecture
from trtspec_plugins.triton.launch import LOGITS_STEP

from tests.e2e.conformance import LIMITS, K, make_models, wishes
from tests.e2e.tiny import make_target
from tests.fake_tensorrt.builder import FakeBuilder, FakeConfig, FakeTensorRT
from tests.fake_tensorrt.golden import assert_golden
from tests.fake_tensorrt.plugins import fake_plugin_of
from tests.fp8_checkpoints import Fp8Kind, fp8
from tests.tensorrt_stand_in import CudaRuntime
from trtspec.backends.compiled import CompiledStep
from trtspec.backends.onnx.export import DOMAIN
from trtspec.backends.sizes import LOGITS_DEPTH, Sizes
from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt.compile import (
    _kernels_for,
    _needs,
    aot_kernels,
    build_plan,
    compile_step,
    require,
)
from trtspec.backends.tensorrt.cuda import Cuda
from trtspec.backends.tensorrt.executable import load_tensorrt
from trtspec.backends.tensorrt.profiles import Profile, TensorRTOptions, profiles
from trtspec.build.context import plan_context
from trtspec.build.steps import build_steps
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, DependencyError, EngineError
from trtspec.interop.reading import read_speculative_config

pytestmark = pytest.mark.slow

SIZES = Sizes(batch_size=8, rows=32, draft_len=K, columns=26, blocks=41, block_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def compiled(
    models: Path,
    folder: Path,
    mode: str = "none",
    role: str = "target",
    options: TensorRTOptions | None = None,
    draft_lens: Sequence[int] = (0,),
    linear: bool = False,
    checkpoint: Path | None = None,
    dtype: str = "float32",
) -> CompiledStep:
    config = EngineConfig(backend="onnx", dtype=dtype, **LIMITS)
    wanted = read_speculative_config(wishes(mode, models, False))
    step = build_steps(plan_context(checkpoint or models / "target", wanted, config, BACKENDS["tensorrt"]))[role]
    sizes = SIZES if mode != "none" else replace(SIZES, draft_len=0)
    if linear:
        sizes = replace(sizes, linear=True, blocks=9, block_size=104, columns=1)
    given = {"trt": FakeTensorRT(), "cuda": Cuda(CudaRuntime()), "plugin_of": fake_plugin_of}
    graphs = [(K, False) for K in draft_lens]
    return compile_step(step, LIMITS["block_size"], graphs, folder, sizes=sizes, options=options, **given)


@pytest.mark.parametrize(
    ("mode", "role", "attention"),
    [
        ("draft", "draft", "native"),
        pytest.param("eagle3_two_engine", "draft", "plugin", marks=pytest.mark.long),
    ],
)
def test_what_is_asked_for_is_what_is_written_down(
    models: Path, tmp_path: Path, mode: str, role: str, attention: str
) -> None:
    """Networks that test_tensorrt_runtime.py does not run are those of the golden files."""
    native = attention == "native"
    made = compiled(models, tmp_path, mode, role, draft_lens=(K,) if mode.startswith("eagle3") else (0,), linear=native)
    assert (made.linear, made.kv_blocks) == ((True, 9) if native else (False, SIZES.blocks))
    assert [graph.file for graph in made.graphs] == ["rank0.engine"]
    assert FakeBuilder._built is not None
    network, _ = FakeBuilder._built
    caches = {tensor.name for tensor in network._inputs if "_cache_" in tensor.name}
    assert len(caches) == 2 * len(made.kv)
    assert network._aliases() == {f"new_{name}": name for name in caches}  # through chains of draft steps, too
    assert_golden(f"{mode}, {role}", f"tensorrt_{mode}_{role}{'_native' * native}.txt", *FakeBuilder._built)


def test_logits_that_the_core_gives_to_the_plugin_fit_its_kernel() -> None:
    assert LOGITS_DEPTH % LOGITS_STEP == 0


def test_what_is_asked_for_of_an_fp8_checkpoint(models: Path, tmp_path: Path) -> None:
    """Each linear of a layer has a layer that rounds x, a layer that undoes it, and one for the weights."""
    folder, _, _ = fp8(make_target(tmp_path, num_hidden_layers=1), tmp_path, Fp8Kind("modelopt"))
    compiled(models, tmp_path, checkpoint=folder, dtype="bfloat16")
    assert FakeBuilder._built is not None
    assert_golden("none, target, fp8 weights and inputs", "tensorrt_none_target_fp8.txt", *FakeBuilder._built)


@pytest.mark.long
def test_each_draft_length_has_an_engine(models: Path, tmp_path: Path) -> None:
    made = compiled(models, tmp_path, "eagle3", draft_lens=(0, K))
    assert [(graph.file, graph.draft_len) for graph in made.graphs] == [
        ("rank0_k0.engine", 0),
        ("rank0.engine", K),
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.engine", "rank0_k0.engine"]
    assert not any(graph.uniform or "tree_mask" in graph.inputs for graph in made.graphs)
    assert CompiledStep.from_dict(made.to_dict()) == made
    assert FakeBuilder._built is not None
    network, _ = FakeBuilder._built  # the last, for K = 0
    assert {tensor.name: tensor.shape for tensor in network._inputs}["draft_tokens"] == (-1, 0)


@pytest.fixture(scope="module")
def exported() -> tuple[ir.Model, tuple[Profile, ...]]:
    """A graph that takes no time to export, and its profiles."""
    x = ir.Value(name="kv_lens", shape=ir.Shape(["B"]), type=ir.TensorType(ir.DataType.INT32))
    node = ir.node("Add", [x, x])
    node.outputs[0].name = "twice"
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    return model, profiles(("kv_lens", "tree_mask"), (), SIZES)


def planned(exported: tuple[ir.Model, tuple[Profile, ...]], **options: Any) -> FakeConfig:
    """The config that the plan was built with."""
    plan, _ = build_plan(FakeTensorRT(), *exported, TensorRTOptions(**options), fake_plugin_of)
    assert plan == b"a plan"
    assert FakeBuilder._built is not None
    return FakeBuilder._built[1]


def test_options_become_flags(exported: tuple[ir.Model, tuple[Profile, ...]]) -> None:
    config = planned(
        exported,
        weight_streaming=True,
        refit=True,
        strip_plan=True,
        version_compatible=True,
        hardware_compatibility="ampere_plus",
    )
    assert config._flags == ["WEIGHT_STREAMING", "REFIT_INDIVIDUAL", "STRIP_PLAN", "VERSION_COMPATIBLE"]
    assert config.hardware_compatibility_level.name == "AMPERE_PLUS"
    assert planned(exported)._flags == []


def test_timing_caches_are_files(exported: tuple[ir.Model, tuple[Profile, ...]], tmp_path: Path) -> None:
    known, out = tmp_path / "known", tmp_path / "new" / "out"
    known.write_bytes(b"known")
    planned(exported, input_timing_cache=str(known), output_timing_cache=str(out))
    assert out.read_bytes() == b"known+"  # the stand-in adds a plus for what it has timed
    known.write_bytes(b"of another GPU")
    with pytest.raises(ConfigError, match="is of another TensorRT or GPU; leave it away"):
        planned(exported, input_timing_cache=str(known))
    with pytest.raises(ConfigError, match=r"input_timing_cache: .*leave it away for the first build"):
        planned(exported, input_timing_cache=str(tmp_path / "none"))


def test_what_the_builder_refuses_is_an_error(
    exported: tuple[ir.Model, tuple[Profile, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBuilder, "_refuses", True)
    with pytest.raises(EngineError, match="TensorRT did not build the engine; its log says why"):
        planned(exported)


def test_what_an_engine_needs_where_it_runs() -> None:
    """An engine that was built to run with others needs neither its very version of TensorRT nor its card."""
    here = {
        "tensorrt": "11.4.0.106",
        "tensorrt major version": "11",
        "gpu": "Stand-in",
        "compute_capability": "9.0",
    }
    lenient = TensorRTOptions(version_compatible=True, hardware_compatibility="same_compute_capability")
    assert _needs(here, lenient) == {"tensorrt major version": "11", "compute_capability": "9.0"}
    lenient = TensorRTOptions(hardware_compatibility="ampere_plus")
    assert _needs(here, lenient) == {"tensorrt": "11.4.0.106"}


def test_an_engine_for_many_gpus_gets_kernels_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_90a's kernels run on 9.0 alone."""
    monkeypatch.setenv("TRTSPEC_CUDA_ARCH", "sm_90")
    with _kernels_for(TensorRTOptions(hardware_compatibility="ampere_plus")):
        assert architecture() == "sm_80"
    with _kernels_for(TensorRTOptions(hardware_compatibility="same_compute_capability")):
        assert architecture() == "sm_90"


def test_two_builds_enter_their_kernels_in_one_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of another version of the file do not count, and do no harm."""
    monkeypatch.setenv("TRTSPEC_TENSORRT_PLUGIN_DIR", str(tmp_path))
    (tmp_path / "manifest.json").write_text('{"old-sm_80": {"file": "old.ptx", "blocks": 3}}')
    one, other = (kernels.Compiled(f"{name}.ptx", name, 3, 32, 0, "sm_80", "digest") for name in ("one", "other"))
    assert kernels.manifest() == {}
    kernels._enter("one-sm_80", one)
    assert kernels._enter("other-sm_80", other) == {"one-sm_80": one, "other-sm_80": other} == kernels.manifest()


@pytest.mark.parametrize(("dtype", "bits"), [("FLOAT", "fp32"), ("FLOAT16", "fp16"), ("BFLOAT16", "bf16")])
def test_kernels_of_attention_are_named_by_their_shapes(dtype: str, bits: str) -> None:
    type_ = ir.TensorType(ir.DataType[dtype])
    q, k = (ir.Value(name=name, shape=ir.Shape(["T", heads, 64]), type=type_) for name, heads in (("q", 8), ("k", 2)))
    node = ir.Node(DOMAIN, "SpecAttention", [q, k])
    model = ir.Model(ir.Graph([q, k], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    assert aot_kernels(model) == {f"SpecAttention-{bits}-d64-g4"}
    assert aot_kernels(model, native=True) == set()


# --- what is needed


def test_without_tensorrt_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # as if it were not installed, even where it is
    load_tensorrt.cache_clear()
    with pytest.raises(DependencyError, match=r"TensorRT is missing .*pip install 'trtspec\[tensorrt\]'"):
        require()


def test_an_old_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.13.2"))
    load_tensorrt.cache_clear()
    with pytest.raises(DependencyError, match=r"TensorRT 10.13.2 is too old, 11.x is needed: pip install --upgrade"):
        require()
