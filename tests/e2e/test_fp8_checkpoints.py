"""Whole engines on fp8 checkpoints: speculation changes nothing.

The tests run op by op, compiled, on ONNX Runtime, and in TensorRT networks as the stand-in computes them. With inputs
rounded to steps of a sixteenth, the sums of another backend have other bits. With weights alone in fp8 nothing is
rounded, so only then do other backends return eager's ids.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conformance import CASES, LIMITS, TIGHT, K, make_models, packed, speculation, wishes
from tests.e2e.tensorrt_engines import cuda, kernels, trt
from tests.e2e.test_tensorrt_builds import CONFIG
from tests.e2e.tiny import make_target, run_alone, run_together
from tests.fp8_checkpoints import Fp8Kind, fp8
from tests.tensorrt_stand_in import TensorRT
from trtspec import LLM
from trtspec.backends.export import example_batch
from trtspec.backends.graph_io import INPUTS, graph_inputs, input_names
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import EngineError
from trtspec.interop.reading import read_speculative_config

__all__ = ["cuda", "kernels", "trt"]  # fixtures
STATIC, ALONE = Fp8Kind("hf_quant_config"), Fp8Kind("compressed-tensors", per_channel=True, inputs="dynamic")
KINDS = [STATIC, ALONE]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def checkpoints(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Fp8Kind, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: fp8(models / "target", folder / str(kind), kind)[0] for kind in KINDS}


def built(folder: Path, output: Path, config: EngineConfig, models: Path, mode: str = "none", **more: Any) -> Path:
    build_engine(folder, output, read_speculative_config(wishes(mode, models, False)), config, **more)
    return output


@pytest.mark.parametrize(
    ("kind", "mode", "dtype"),
    [
        (STATIC, "eagle3", "bfloat16"),
        (ALONE, "ngram", "float32"),
        *(
            pytest.param(STATIC, mode, dtype, marks=pytest.mark.long)
            for mode, dtype in (("eagle3", "float32"), ("ngram", "bfloat16"), ("ngram", "float32"))
        ),
        *(
            pytest.param(ALONE, mode, dtype, marks=pytest.mark.long)
            for mode, dtype in (("ngram", "bfloat16"), ("eagle3", "bfloat16"), ("eagle3", "float32"))
        ),
    ],
    ids=str,
)
def test_speculation_changes_nothing(
    models: Path, checkpoints: dict[Fp8Kind, Path], kind: Fp8Kind, mode: str, dtype: str
) -> None:
    """Packed requests with drafts in a tight cache, greedy and sampled, equal plain decoding one at a time."""
    alone = run_alone(LLM(checkpoints[kind], dtype=dtype, num_kv_blocks=128, **LIMITS).engine, CASES)
    run = packed(LLM(checkpoints[kind], speculation(mode, models), dtype=dtype, **LIMITS, **TIGHT))
    assert run.outcomes == alone
    assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


def test_a_draft_in_fp8(models: Path, tmp_path: Path) -> None:
    folder, _, _ = fp8(models / "draft", tmp_path, STATIC)
    spec = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": K}
    llm = LLM(models / "target", spec, **LIMITS, **TIGHT)
    run = packed(llm)
    assert run.outcomes == run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)
    assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_compiled_engine(models: Path, checkpoints: dict[Fp8Kind, Path], tmp_path: Path, kind: Fp8Kind) -> None:
    eager = LLM(checkpoints[kind], num_kv_blocks=128, **LIMITS)
    output = built(checkpoints[kind], tmp_path / "engine", EngineConfig(**LIMITS), models)
    data = json.loads((output / "config.json").read_text())
    decoder: Any = eager.engine.loop.target.inner.step.decoder
    assert data["executables"]["target"]["weight_bytes"] == decoder.weight_bytes_per_step
    assert data["checkpoint_quantization"]["target"].split(", ")[1].startswith("fp8 per")
    stored = load_file(output / "target" / "weights.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == 3 * 4
    alone = run_alone(LLM(output, num_kv_blocks=128).engine, CASES)
    assert packed(LLM(output, speculation("ngram", models), **TIGHT)).outcomes == alone
    if kind is ALONE:
        assert run_together(eager.engine, CASES).outcomes == alone


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_onnx_runtime(models: Path, checkpoints: dict[Fp8Kind, Path], tmp_path: Path, kind: Fp8Kind) -> None:
    """ONNX Runtime's own operators for fp8 compute the engine. Its files hold one byte per weight."""
    output = built(checkpoints[kind], tmp_path / "engine", EngineConfig(backend="onnx", **LIMITS), models)
    alone = run_alone(LLM(output, num_kv_blocks=128).engine, CASES)
    assert packed(LLM(output, speculation("ngram", models), **TIGHT)).outcomes == alone
    if kind is ALONE:
        assert run_alone(LLM(checkpoints[kind], num_kv_blocks=128, **LIMITS).engine, CASES) == alone
    [file] = output.rglob("*.onnx")
    onnx.checker.check_model(str(file), full_check=True)
    kinds = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
    assert kinds.count("QuantizeLinear") == (12 if kind is STATIC else 0)
    assert kinds.count("DequantizeLinear") == (24 if kind is STATIC else 12)
    matrices = [t for n, t in load_file(output / "target" / "weights.safetensors").items() if n.endswith(".matrix")]
    assert [tensor.dtype for tensor in matrices] == 3 * 3 * [torch.float8_e4m3fn]  # o is so small that graphs hold it


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_network_of_tensorrts(
    trt: TensorRT, models: Path, checkpoints: dict[Fp8Kind, Path], tmp_path: Path, kind: Fp8Kind
) -> None:
    made = {}
    for mode in ("none", "ngram" if kind is STATIC else "eagle3"):
        built(checkpoints[kind], tmp_path / mode, CONFIG, models, mode)
        made[mode] = run_together(LLM(tmp_path / mode).engine, CASES[:12]).outcomes
        layers = [type(layer).__name__ for layer in list(trt.plans.values())[-1][0]._layers]
        assert (layers.count("Quantize"), layers.count("Dequantize")) == ((12, 24) if kind is STATIC else (0, 12))
    assert made["none"] == made[mode]
    if kind is ALONE:
        assert made["none"] == run_alone(LLM(checkpoints[kind], num_kv_blocks=128, **LIMITS).engine, CASES[:12])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_step_is_what_its_network_computes(trt: TensorRT, models: Path, tmp_path: Path, dtype: str) -> None:
    """With rounded inputs, too, the network returns the eager step's tokens.

    Keys and values differ by up to a sixteenth here and there.
    """
    checkpoint, _, _ = fp8(make_target(tmp_path, num_hidden_layers=1), tmp_path / "fp8", STATIC)
    eager = LLM(checkpoint, dtype=dtype, **LIMITS, **TIGHT).engine.loop.target.inner
    output = built(checkpoint, tmp_path / "engine", replace(CONFIG, dtype=dtype), models)
    network = list(trt.plans.values())[-1][0]
    inputs = example_batch(0, LIMITS["block_size"])
    inputs = replace(inputs, input_ids=torch.arange(inputs.input_ids.shape[0]) % 9 + 1)
    shapes = [tuple(tensor.shape) for layer in eager.kv for tensor in layer]
    g, element = torch.Generator().manual_seed(0), getattr(torch, dtype)
    before = [torch.randn(shape, generator=g).to(element) for shape in shapes]
    after = [(k.clone(), v.clone()) for k, v in zip(before[::2], before[1::2], strict=True)]
    with torch.no_grad():
        tokens = eager.step(inputs, after).tokens
    caches = {f"{'kv'[i % 2]}_cache_{i // 2}": tensor.clone() for i, tensor in enumerate(before)}
    rows = inputs.spec.gather_ids.shape[0]
    unused = {name: row.unused(rows) for name, row in INPUTS.items() if row.taker == "constraints"}
    tensors = graph_inputs(inputs, input_names(eager.step)) | unused
    wanted = {tensor.name for tensor in network._inputs}
    got = network._run({name: tensor for name, tensor in (tensors | caches).items() if name in wanted})
    assert torch.equal(got["tokens"], tokens)
    for i, layer in enumerate(after):
        for part, want in zip("kv", layer, strict=True):
            error = (got[f"new_{part}_cache_{i}"].float() - want.float()).norm()
            assert error <= {"float32": 1e-3, "bfloat16": 0.02}[dtype] * want.float().norm()
    assert output.is_dir()


@pytest.mark.long
def test_stripped_plans_get_fp8_weights_next_to_them(
    trt: TensorRT, models: Path, checkpoints: dict[Fp8Kind, Path], tmp_path: Path
) -> None:
    options = TensorRTOptions(strip_plan=True)
    built(checkpoints[STATIC], tmp_path / "engine", CONFIG, models, options=options)
    assert LLM(tmp_path / "engine").generate([[1, 2, 3]], use_tqdm=False)[0].finished
    file = tmp_path / "engine" / "target" / "weights.safetensors"
    weights = load_file(file)
    [matrix, *others] = [name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(others) == 11
    weights[matrix] = (-weights[matrix].float()).to(torch.float8_e4m3fn)
    save_file(weights, file)
    with pytest.raises(EngineError, match=r"rank0.*\.engine: TensorRT did not take its weights"):
        LLM(tmp_path / "engine")
