"""TensorRT engine folders that are built with other options, or refused, on stand-ins for TensorRT and CUDA."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e import tensorrt_engines
from tests.e2e.conformance import CASES, LIMITS, TIGHT, wishes
from tests.e2e.tensorrt_engines import Built
from tests.e2e.tiny import Outcome, add_tokenizer, make_target, run_together
from tests.tensorrt_stand_in import TensorRT
from trtspec import LLM, SamplingParams, StructuredOutputs
from trtspec.backends.table import COMPILERS
from trtspec.backends.tensorrt import compile as tensorrt_compile
from trtspec.backends.tensorrt import executable as tensorrt
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.cli.main import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError, ConfigError, DependencyError, EngineError, RequestError, UnsupportedError
from trtspec.interop.reading import read_speculative_config

CONFIG = EngineConfig(backend="tensorrt", dtype="float32", **LIMITS, **TIGHT)
CHECK_KERNELS = tensorrt_compile.check_kernels

models = tensorrt_engines.models
cuda = tensorrt_engines.cuda
kernels = tensorrt_engines.kernels
trt = tensorrt_engines.trt
built = tensorrt_engines.built
plain = tensorrt_engines.plain


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of one layer, which is soon built."""
    folder = make_target(tmp_path_factory.mktemp("small"), num_hidden_layers=1)
    add_tokenizer(folder)
    return folder


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


@pytest.mark.long
def test_sequences_may_be_as_long_as_a_plan_says(trt: TensorRT, models: Path, tmp_path: Path) -> None:
    """Sequences may be as long as the plan allows. The engine made its block tables wider, to leave room for growth."""
    config = replace(CONFIG, max_seq_len=40)
    build_engine(models / "target", tmp_path / "engine", None, config)
    prompt = [1 + i % 14 for i in range(32)]
    [output] = LLM(tmp_path / "engine").generate([prompt], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 8)


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
    trt: TensorRT, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cache = tmp_path / "engine", tmp_path / "timing"
    options = {
        "checkpoint_dir": small, "output_dir": engine, "backend": "tensorrt", "dtype": "float32",
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


# -- an engine folder that was built without constraints ---------------------------------------------------------------


@pytest.fixture
def without(
    trt: TensorRT,
    small: Path,
    built: dict[tuple[str, bool], Built],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """An engine folder without constraints, whose generation_config.json has a penalty, such as Qwen2.5's."""
    monkeypatch.setitem(COMPILERS, "tensorrt", replace(COMPILERS["tensorrt"], constraints=False))
    if not built:
        folder = tmp_path_factory.mktemp("without")
        opinionated = shutil.copytree(small, folder / "target")
        file = opinionated / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.5}))
        build_engine(opinionated, folder / "engine", None, CONFIG)
        built["none", False] = Built(folder / "engine", dict(trt.plans), set())
    trt.plans.update(built["none", False].plans)
    return built["none", False].folder


def test_constraints_on_logits_are_refused_by_name(without: Path) -> None:
    """Plans have no inputs for constraints on logits, so the error names the constraints."""
    llm = LLM(without, generation_config="off", **TIGHT)
    params = SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=2)
    asked = r"repetition_penalty = 1\.2, logit_bias = \(\(3, 1\.0\),\), logprobs = 2"
    with pytest.raises(RequestError, match=rf"{asked}: this engine on backend tensorrt .*build the engine again"):
        llm.generate([[1, 2]], params, use_tqdm=False)
    # The refusal comes before a grammar is compiled, so its error is not found, and its package may be missing.
    with pytest.raises(RequestError, match=r"structured_outputs = .*: this engine on backend tensorrt"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=StructuredOutputs(regex="(")), use_tqdm=False)


def test_a_penalty_that_nobody_asked_for_is_dropped_with_a_warning(
    without: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    [want] = LLM(small, num_kv_blocks=128, **LIMITS).generate([[1, 2]], params, use_tqdm=False)
    llm = LLM(without, **TIGHT)
    for _ in range(2):
        [got] = llm.generate([[1, 2]], params, use_tqdm=False)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
    [warning] = caplog.messages
    assert "generation_config.json says repetition_penalty = 1.5, and this engine on backend tensorrt" in warning
    caplog.clear()
    LLM(without, generation_config="off", **TIGHT)
    assert not caplog.records
