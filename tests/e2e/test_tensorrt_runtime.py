"""TensorRT engines on stand-ins for TensorRT and CUDA (tests/tensorrt_stand_in.py): built, loaded and run.

They run the conformance suite's requests, as any backend does. So networks, bindings, profiles, buffers and CUDA graphs
are right for every batch that the engine makes, as far as TensorRT does what it documents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import tensorrt_engines
from tests.e2e.conformance import CASES, LIMITS, MODES, TIGHT, K, packed, wishes
from tests.e2e.tensorrt_engines import Built
from tests.e2e.tiny import Outcome, run_together
from tests.fake_tensorrt.golden import assert_golden
from tests.tensorrt_stand_in import Context, CudaRuntime, TensorRT
from trtspec import LLM, SamplingParams
from trtspec.backends.export import example_batch
from trtspec.backends.tensorrt import compile as tensorrt_compile
from trtspec.backends.tensorrt import executable as tensorrt
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.cli.main import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import (
    CheckpointError,
    ConfigError,
    DependencyError,
    DeviceError,
    EngineError,
    UnsupportedError,
)
from trtspec.interop.reading import read_speculative_config

CONFIG = EngineConfig(backend="tensorrt", dtype="float32", **LIMITS, **TIGHT)
CHECK_KERNELS = tensorrt_compile.check_kernels
KERNELS = {"SpecAttention-fp32-d8-g2", "ProcessLogitsConstrained", "SpecSample"}
BUILT = [pytest.param(mode, marks=pytest.mark.long) if mode in ("ngram", "draft") else mode for mode in MODES]
MODE_KERNELS = {
    "draft": {*KERNELS, "ProcessLogits"},  # the draft's logits have no constraints
    "eagle3": {*KERNELS, "ProcessLogits", "SpecSampleVocab", "SpecAccept"},
}


models = tensorrt_engines.models
cuda = tensorrt_engines.cuda
kernels = tensorrt_engines.kernels
trt = tensorrt_engines.trt
built = tensorrt_engines.built
engine = tensorrt_engines.engine
plain = tensorrt_engines.plain


@pytest.mark.parametrize("mode", BUILT)
def test_what_is_asked_for_is_what_is_written_down(
    engine: Callable[..., Path], built: dict[tuple[str, bool], Built], mode: str
) -> None:
    """Networks, profiles and flags are those of the golden files."""
    engine(mode)
    one = built[mode, False]
    for role, plan in zip(("target", "draft"), one.plans.values(), strict=False):
        assert_golden(f"{mode}, {role}", f"tensorrt_{mode}_{role}.txt", *plan)
    assert len(one.plans) == 1 + (mode == "draft")
    assert one.kernels == MODE_KERNELS.get(mode, KERNELS)


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        *((mode, False) for mode in ("none", "eagle3")),
        *(pytest.param(mode, False, marks=pytest.mark.long) for mode in ("ngram", "draft")),
        *(pytest.param(mode, True, marks=pytest.mark.long) for mode in ("eagle3", "eagle3_two_engine")),
    ],
)
def test_batches_of_every_kind(
    engine: Callable[..., Path], cuda: CudaRuntime, plain: list[Outcome], mode: str, schedule: bool
) -> None:
    """Packed in a tight cache, outcomes are eager's of each request alone. All device memory is freed."""
    folder = engine(mode, schedule)
    before = len(cuda.blocks)
    run = packed(LLM(folder, **TIGHT))
    assert run.outcomes == plain
    assert cuda.launched_graphs > 0
    del run
    import gc

    gc.collect()
    assert len(cuda.blocks) == before


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "ngram", "draft"])
def test_attention_of_tensorrts_own(
    trt: TensorRT, plain: list[Outcome], models: Path, tmp_path: Path, mode: str
) -> None:
    """TensorRT's own attention, with a linear cache and no plugin, has eager's outcomes of each request alone."""
    config = EngineConfig(backend="tensorrt", dtype="float32", **LIMITS)
    speculation = read_speculative_config(wishes(mode, models, False))
    options = TensorRTOptions(attention="native")
    build_engine(models / "target", tmp_path / "engine", speculation, config, options=options)
    for network, _ in trt.plans.values():
        assert not [layer for layer in network._layers if getattr(layer._settings.get("plugin"), "aliases", None)]
    llm = LLM(tmp_path / "engine")
    assert llm.engine.loop.scheduler.allocator.num_blocks == LIMITS["max_batch_size"] + 1
    assert [cache.shape[0] for cache in llm.engine.loop.target.inner.kv[0]] == [LIMITS["max_batch_size"]] * 2
    run = run_together(llm.engine, CASES)
    assert run.outcomes == plain
    assert run.num_mixed_steps > 0 or mode == "none"


def test_what_attention_of_tensorrts_own_cannot_do(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    options = TensorRTOptions(attention="native")
    config = EngineConfig(backend="tensorrt", dtype="float32", **LIMITS)
    for wanted, mode in (("eagle3", "EAGLE3_ONE_MODEL"), ("eagle3_two_engine", "EAGLE3")):
        speculation = read_speculative_config(wishes(wanted, models, False))
        with pytest.raises(UnsupportedError, match=f"{mode} with 3 drafts writes the draft layers' cache 3 times"):
            build_engine(models / "target", tmp_path / "engine", speculation, config, options=options)
    with pytest.raises(ConfigError, match="leave num_kv_blocks and kv_cache_memory unset"):
        build_engine(models / "target", tmp_path / "engine", None, CONFIG, options=options)
    facts = json.loads((models / "target" / "config.json").read_text())
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    shutil.copytree(models / "target", tmp_path / "windows")
    (tmp_path / "windows" / "config.json").write_text(json.dumps({**facts, **windows}))
    with pytest.raises(UnsupportedError, match="without sliding windows"):
        build_engine(tmp_path / "windows", tmp_path / "engine", None, config, options=options)


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers(trt: TensorRT, models: Path, tmp_path: Path, quantization: str) -> None:
    """With weights of 8 and 4 bits, speculation changes nothing. With 4 bits the ids are eager decoding's."""
    made = {}
    for mode in ("none", "eagle3"):
        config = replace(CONFIG, quantization=quantization)
        speculation = read_speculative_config(wishes(mode, models, False))
        build_engine(models / "target", tmp_path / mode, speculation, config)
        layers = [type(layer).__name__ for layer in list(trt.plans.values())[-1][0]._layers]
        assert ("Dequantize" in layers) == (quantization == "int8")
        made[mode] = run_together(LLM(tmp_path / mode).engine, CASES[:12]).outcomes
    assert made["none"] == made["eagle3"]
    if quantization == "int4":
        with LLM(models / "target", backend="eager", dtype="float32", quantization="int4", **LIMITS) as eager:
            assert run_together(eager.engine, CASES[:12]).outcomes == made["none"]


def executable(folder: Path) -> Any:
    return LLM(folder, **TIGHT).engine.loop.target.inner


def test_steps_take_turns_with_two_sets_of_buffers(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    plan = found._graphs[0].run.__self__
    assert plan.sets[0].keys() == plan.sets[1].keys()
    assert not {m.address for m in plan.sets[0].values()} & {m.address for m in plan.sets[1].values()}
    bound = []
    launch = plan._launch
    plan._launch = lambda *of: bound.append((context := launch(*of)).addresses["input_ids"]) or context
    for _ in range(6):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert bound == [plan.sets[i]["input_ids"].address for i in (0, 1, 0, 1, 0, 1)]


def test_generations_have_a_profile_of_their_own(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    plan = found._graphs[0].run.__self__
    found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert [context.ran for context in plan.contexts] == [False, True]
    graph, tensors = found._checked(example_batch(K, LIMITS["block_size"]))
    shapes = [(32,) if name == "input_ids" else tuple(x.shape) for name, x in zip(graph.names, tensors, strict=True)]
    assert plan._profile(shapes) == tensorrt.GENERATION  # 32 rows are 8 requests' worth
    plan.largest[tensorrt.GENERATION]["input_ids"] = (1,)
    assert plan._profile(shapes) == tensorrt.MIXED
    found.run(example_batch(K, LIMITS["block_size"]))
    assert plan.contexts[tensorrt.MIXED].ran
    assert {profile for profile, *_ in plan.seen} == {tensorrt.GENERATION}  # others are never captured


@pytest.mark.long
def test_sequences_may_be_as_long_as_a_plan_says(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    """Sequences may be as long as the plan allows. The engine made its block tables wider, to leave room for growth."""
    config = replace(CONFIG, max_seq_len=40)
    build_engine(models / "target", tmp_path / "engine", None, config)
    prompt = [1 + i % 14 for i in range(32)]
    [output] = LLM(tmp_path / "engine").generate([prompt], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 8)


def test_what_a_plan_was_not_built_for_is_named(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    inputs = example_batch(K, LIMITS["block_size"])
    most = found._graphs[0].run.__self__.largest[tensorrt.MIXED]["block_tables"][1]
    tables = torch.ones(4, most + 8, dtype=torch.int32)
    tables[:, : inputs.attn.block_tables.shape[1]] = inputs.attn.block_tables
    message = (
        rf"block_tables has the shape \[4, {most + 8}\], 8 more along axis 1 than .* \[8, {most}\]; .*--max_seq_len"
    )
    with pytest.raises(EngineError, match=message):
        found.run(replace(inputs, attn=replace(inputs.attn, block_tables=tables)))


def test_a_plan_that_cannot_be_captured_runs_without(
    engine: Callable[..., Path], cuda: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capture_fails = True
    found = executable(engine("eagle3"))
    for _ in range(6):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert cuda.launched_graphs == 0
    assert [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]


def test_a_lost_device_ends_all_requests(engine: Callable[..., Path], cuda: CudaRuntime) -> None:
    """None of them is launched again alone, as nothing runs any more."""
    llm = LLM(engine("none"), **TIGHT)
    cuda.lost = True
    with pytest.raises(EngineError, match=r"DeviceError: .* error 700; the GPU failed"):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert isinstance(llm.failure, DeviceError)


def test_a_step_that_tensorrt_does_not_run_may_mean_a_lost_device(
    engine: Callable[..., Path], cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = executable(engine("none"))
    monkeypatch.setattr(Context, "execute_async_v3", lambda self, stream: False)
    with pytest.raises(EngineError, match="did not run the step, its messages say why"):
        found.run(example_batch(0, LIMITS["block_size"]))
    cuda.lost = True
    with pytest.raises(DeviceError, match="the GPU failed"):
        found.run(example_batch(0, LIMITS["block_size"]))


def test_plans_of_another_version_or_card_are_refused(
    engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engine("none")
    made_for = json.loads((folder / "config.json").read_text())["executables"]["target"]["made_for"]
    assert made_for == {"tensorrt": "11.4.0.106", "gpu": "Stand-in", "compute_capability": "9.0"}
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


def test_a_plan_that_tensorrt_cannot_read_is_named(engine: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engine("none"), tmp_path / "engine")
    plan = folder / "target" / "rank0.engine"
    plan.write_bytes(b"X" * plan.stat().st_size)
    with pytest.raises(CheckpointError, match=r"TensorRT 11.4.0.106 cannot read .*rank0\.engine"):
        LLM(folder, **TIGHT)


@pytest.mark.long
def test_plans_may_be_built_for_later_versions(
    trt: TensorRT, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TensorRTOptions(version_compatible=True)
    build_engine(models / "target", tmp_path / "engine", None, CONFIG, options=options)
    monkeypatch.setattr(TensorRT, "__version__", "11.5.0.1")
    assert LLM(tmp_path / "engine").generate([[1, 2, 3]], use_tqdm=False)[0].finished
    monkeypatch.setattr(TensorRT, "__version__", "12.0.0.1")
    with pytest.raises(CheckpointError, match="built for tensorrt major version 11, this is 12"):
        LLM(tmp_path / "engine")


@pytest.mark.long
def test_stripped_plans_get_their_weights_next_to_them(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    options = TensorRTOptions(strip_plan=True, weight_streaming=True)
    speculation = read_speculative_config(wishes("eagle3", models, True))
    config = replace(CONFIG, quantization="int4")
    build_engine(models / "target", tmp_path / "engine", speculation, config, options=options)
    assert len(list((tmp_path / "engine" / "target").glob("rank0*.engine"))) == 3
    llm = LLM(tmp_path / "engine")
    assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].finished
    for graph in llm.engine.loop.target.inner._graphs:
        assert graph.run.__self__.engine.weight_streaming_budget_v2 == 2048
    file = tmp_path / "engine" / "target" / "weights.safetensors"
    size = file.stat().st_size
    save_file(
        {name: tensor + 1 if tensor.is_floating_point() else ~tensor for name, tensor in load_file(file).items()}, file
    )
    assert file.stat().st_size == size
    with pytest.raises(EngineError, match=r"rank0.*\.engine: TensorRT did not take its weights"):
        LLM(tmp_path / "engine")


def test_the_cache_is_as_large_as_the_plan_says(engine: Callable[..., Path]) -> None:
    folder = engine("none")
    for option in ({}, TIGHT, {"kv_cache_memory": 2**30}):
        assert LLM(folder, **option).engine.loop.scheduler.allocator.num_blocks == 41
    for option in ({"num_kv_blocks": 42}, {"kv_cache_memory": 30_000}):
        with pytest.raises(ConfigError, match=r"num_kv_blocks = 41, which take \d+ bytes; \d+ were asked for: rebuild"):
            LLM(folder, **option)


@pytest.mark.long
def test_kernels_that_are_not_compiled_stop_a_build(
    trt: TensorRT, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are not compiled stop a build before TensorRT is called. No file is left."""
    monkeypatch.setattr(tensorrt_compile, "check_kernels", CHECK_KERNELS)
    monkeypatch.setenv("TRTSPEC_TENSORRT_PLUGIN_DIR", str(tmp_path / "plugins"))
    monkeypatch.setenv("TRTSPEC_CUDA_ARCH", "sm_90")
    message = r"TensorRT plugins: .*run build_scripts/build_plugins.py --target tensorrt --arch sm_90"
    with pytest.raises(DependencyError, match=message):
        build_engine(models / "target", tmp_path / "engine", None, CONFIG)
    assert not trt.plans
    assert not list(tmp_path.iterdir())


def test_from_the_command_line(
    trt: TensorRT, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cache = tmp_path / "engine", tmp_path / "timing"
    options = {
        "checkpoint_dir": models / "target", "output_dir": engine, "backend": "tensorrt", "dtype": "float32",
        "max_batch_size": 4, "max_num_tokens": 32, "block_size": 4, "num_kv_blocks": 41, "opt_num_tokens": 8,
        "output_timing_cache": cache,
    }  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["build", *arguments]) == 0
    assert cache.is_file()
    [(_, config)] = trt.plans.values()
    assert config._profiles[tensorrt.MIXED]._shapes["input_ids"] == ((1,), (8,), (32,))
    assert main(["verify", str(engine)]) == 0
    assert main(["generate", "--model", str(engine), "--prompt", "a b", "--max-tokens", "4"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(TensorRT, "__version__", "11.5.0.1")
    assert main(["verify", str(engine)]) == 1
    assert "built for tensorrt 11.4.0.106" in " ".join(capsys.readouterr().err.split())
    plan = engine / "target" / "rank0.engine"
    plan.write_bytes(b"X" * plan.stat().st_size)
    assert main(["verify", str(engine)]) == 1
    assert "rank0.engine is not what was built (its SHA-256 differs)" in " ".join(capsys.readouterr().err.split())
