"""The TensorRT runtime on stand-ins for TensorRT and CUDA (tests/tensorrt_stand_in.py): what it binds, where, when.

The conformance suite's requests run through it as through any backend, so bindings, profiles, buffers and CUDA graphs
are right for every batch that the engine makes. That TensorRT computes what a step does is not shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.conformance import CASES, LIMITS, MODES, TIGHT, K, build, make_models, packed, speculation
from tests.e2e.tiny import run_alone
from tests.tensorrt_stand_in import CudaRuntime, TensorRT
from trtspec import LLM
from trtspec.backends import table, tensorrt
from trtspec.backends.compiled import CompiledStep, Graph
from trtspec.backends.cuda import Cuda
from trtspec.backends.export import Step, example_batch, input_names
from trtspec.backends.table import Backend
from trtspec.backends.tensorrt_profiles import Sizes, profiles
from trtspec.config import engine as engine_config
from trtspec.config import engine_folder
from trtspec.config.engine import EngineConfig
from trtspec.config.model import ModelConfig
from trtspec.errors import CapacityError, CheckpointError, DependencyError, EngineError

BACKENDS = ("eager", "tensorrt")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cuda() -> CudaRuntime:
    return CudaRuntime()


@pytest.fixture
def trt(cuda: CudaRuntime, models: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """Stand-ins in the places of TensorRT, CUDA and what compiles plans."""
    max_seq_len = ModelConfig.from_folder(models / "target").max_seq_len
    found = TensorRT(cuda)
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: found)
    monkeypatch.setattr(tensorrt, "_cuda", lambda: Cuda(cuda))
    for module in (engine_config, engine_folder):
        monkeypatch.setattr(module, "BACKENDS", BACKENDS)
    row = Backend(
        "tensorrt", "trtspec.backends.tensorrt:TensorRTExecutable", "", functional=False, packs=False, extra="tensorrt"
    )
    monkeypatch.setitem(table.BACKENDS, "tensorrt", row)

    def compile_step(
        step: Step, kv_shapes: Any, block_size: int, draft_lens: Any, folder: Path, report: Callable[[str], None]
    ) -> CompiledStep:
        names = tuple(name for name in input_names(step) if name != "tree_mask")
        graphs = []
        for length in draft_lens:
            width = length if "draft_tokens" in names else K
            sizes = Sizes.of(EngineConfig(**LIMITS), max_seq_len, width, TIGHT["num_kv_blocks"])
            file = folder / f"rank0_k{length}.engine"
            file.write_bytes(found.add_plan(step, length, names, profiles(names, kv_shapes, sizes)))
            graphs.append(Graph(file.name, length, False, names))
        where = tensorrt.made_for(found, Cuda(cuda))
        vocab_size = step.decoder.spec.vocab_size
        return CompiledStep(tuple(graphs), step.outputs, tuple(kv_shapes), "float32", vocab_size, 1, "", where)

    monkeypatch.setattr(Backend, "load_compiler", lambda self: compile_step)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_every_kind(trt: TensorRT, cuda: CudaRuntime, models: Path, tmp_path: Path, mode: str) -> None:
    """Packed in a tight cache: the words of eager decoding, one request at a time. Device memory comes back."""
    folder = build(models, tmp_path / mode, "tensorrt", mode, "float32", schedule=True)
    before = len(cuda.blocks)
    run = packed(LLM(folder, **TIGHT))
    assert run.outcomes == run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)
    assert cuda.launched_graphs > 0
    del run
    import gc

    gc.collect()
    assert len(cuda.blocks) == before


def executable(models: Path, tmp_path: Path) -> Any:
    folder = build(models, tmp_path / "engine", "tensorrt", "eagle3", "float32")
    return LLM(folder, **TIGHT).engine.loop.target.inner


def test_steps_take_turns_with_two_sets_of_buffers(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    found = executable(models, tmp_path)
    plan = found._graphs[0].run.__self__
    assert plan.sets[0].keys() == plan.sets[1].keys()
    assert not {m.address for m in plan.sets[0].values()} & {m.address for m in plan.sets[1].values()}
    bound = []
    for _ in range(4):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
        bound.append(plan.contexts[tensorrt.GENERATION].addresses["input_ids"])
    assert bound == [plan.sets[i]["input_ids"].address for i in (0, 1, 0, 1)]


def test_generations_have_a_profile_of_their_own(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    found = executable(models, tmp_path)
    plan = found._graphs[0].run.__self__
    found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert [context.ran for context in plan.contexts] == [False, True]
    wide = replace(example_batch(K, LIMITS["block_size"]), input_ids=torch.ones(32, dtype=torch.int64))
    shapes = [tuple(tensor.shape) for tensor in plan_inputs(found, wide)]
    assert plan._profile(shapes) == tensorrt.GENERATION  # 32 rows are 8 requests' worth
    plan.largest[tensorrt.GENERATION]["input_ids"] = (31,)
    assert plan._profile(shapes) == tensorrt.MIXED


def plan_inputs(found: Any, inputs: Any) -> list[torch.Tensor]:
    return list(found._graphs[0].read(replace(inputs, spec=replace(inputs.spec))))


def test_what_a_plan_was_not_built_for_is_named(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    found = executable(models, tmp_path)
    inputs = example_batch(K, LIMITS["block_size"])
    most = found._graphs[0].run.__self__.largest[tensorrt.MIXED]["block_tables"][1]
    tables = torch.zeros(4, most + 8, dtype=torch.int32)
    tables[:, : inputs.attn.block_tables.shape[1]] = inputs.attn.block_tables
    message = (
        rf"block_tables has the shape \[4, {most + 8}\], 8 more along axis 1 than .* \[8, {most}\]; .*--max_seq_len"
    )
    with pytest.raises(EngineError, match=message):
        found.run(replace(inputs, attn=replace(inputs.attn, block_tables=tables)))


def test_a_plan_that_cannot_be_captured_runs_without(
    trt: TensorRT, cuda: CudaRuntime, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capture_fails = True
    found = executable(models, tmp_path)
    for _ in range(6):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert cuda.launched_graphs == 0
    assert [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]


def test_plans_of_another_version_or_card_are_refused(
    trt: TensorRT, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(models, tmp_path / "engine", "tensorrt", "none", "float32")
    monkeypatch.setattr(TensorRT, "__version__", "11.5.0.1")
    with pytest.raises(
        CheckpointError, match=r"built for tensorrt 11\.4\.0\.106, this is 11\.5\.0\.1; rebuild it here"
    ):
        LLM(folder, **TIGHT)
    monkeypatch.setattr(TensorRT, "__version__", "11.4.0.106")
    monkeypatch.setattr(
        CudaRuntime, "cudaGetDeviceProperties", lambda *_: (0, SimpleNamespace(name=b"Other", major=8, minor=0))
    )
    with pytest.raises(CheckpointError, match="built for gpu Stand-in, this is Other"):
        LLM(folder, **TIGHT)


def test_a_plan_that_tensorrt_cannot_read_is_named(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    folder = build(models, tmp_path / "engine", "tensorrt", "none", "float32")
    (folder / "target" / "rank0_k0.engine").write_bytes(b"plan X")
    with pytest.raises(CheckpointError, match=r"TensorRT 11.4.0.106 cannot read .*rank0_k0\.engine"):
        LLM(folder, **TIGHT)


def test_too_little_device_memory_is_a_capacity_error(cuda: CudaRuntime) -> None:
    with pytest.raises(
        CapacityError, match=r"2\.15 GB of device memory were refused \(out of memory\); lower kv_cache"
    ):
        Cuda(cuda).allocate(2**31)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a stand-in where Cuda.open finds cuda-python."""

    def put(**facts: int) -> None:
        import sys

        stand_in = CudaRuntime(**facts)
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(runtime=stand_in)))
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=stand_in))

    return put


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver here.*use the backend aoti or onnx"),
        ({"driver": 12080}, r"driver serves CUDA 12\.8, and TensorRT 11 needs 13\.0 or newer: update"),
        ({"devices": 0}, r"shows no GPU \(no CUDA-capable device is detected\); check CUDA_VISIBLE_DEVICES"),
    ],
    ids=["no driver", "old driver", "no GPU"],
)
def test_what_is_missing_is_named(runtime: Callable[..., None], facts: dict[str, int], message: str) -> None:
    runtime(**facts)
    with pytest.raises(DependencyError, match=message):
        Cuda.open()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("cuda", "cuda.bindings", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=r"needs cuda-python .*pip install 'trtspec\[tensorrt\]'"):
        Cuda.open()
    tensorrt.load_tensorrt.cache_clear()
    with pytest.raises(DependencyError, match=r"TensorRT is missing .*pip install 'trtspec\[tensorrt\]'"):
        tensorrt.load_tensorrt()
    assert speculation("none", Path()) is None
