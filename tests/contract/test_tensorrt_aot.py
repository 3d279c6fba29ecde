"""The AOT form: kernels compiled without a GPU, and their launches by TensorRT's plugin classes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")
triton = pytest.importorskip("triton", reason="Triton is not installed here: make contract-tensorrt")

import trtspec_plugins.tensorrt.build as build  # noqa: E402
from trtspec_plugins.tensorrt import register  # noqa: E402
from trtspec_plugins.tensorrt.kernels import KERNELS, kernel  # noqa: E402
from trtspec_plugins.tensorrt.signatures import PLUGINS  # noqa: E402
from trtspec_plugins.triton.compile import compile_kernel  # noqa: E402

import trtspec.ops  # noqa: E402
from tests.contract.fake_builder import (  # noqa: E402
    TRT_DTYPES,
    Dimension,
    create,
    describe,
    expressions,
    output_shapes,
)

register()
assert trtspec.ops is not None
ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
F32, I32, I64, BOOL = torch.float32, torch.int32, torch.int64, torch.bool
BF16 = torch.bfloat16
ATTENTION = "SpecAttention-bf16-d64-g4"
COMPACTION = "KvCompact-bf16-l8"
LINEAR, ROUNDED, IN_GROUPS = "LinearLogits-bf16", "QuantizeGroups-bf16-g128", "GroupsLinear-bf16-w4-g128"
CONSTRAINED = "ProcessLogitsConstrained"
NAMES = (*KERNELS, ATTENTION, COMPACTION, LINEAR, ROUNDED, IN_GROUPS)
FULL_NAMES = {name: name for name in KERNELS}
FULL_NAMES |= {"SpecAttention": ATTENTION, "SpecAttentionChained": ATTENTION, "KvCompact": COMPACTION}
FULL_NAMES |= {"LinearLogits": LINEAR, "QuantizeGroups": ROUNDED, "GroupsLinear": IN_GROUPS}
# Plugin -> dtypes and shapes of inputs, (grid, heads, integers) at SIZES.
LAUNCHES: dict[str, tuple[list[Any], tuple[int, int, list[int]]]] = {
    "SpecAttention": (
        [
            (BF16, ["T", 8, 64]), (BF16, ["T", 2, 64]), (BF16, ["T", 2, 64]),
            (BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64]), (I32, ["B1"]), (I32, ["B"]), (I32, ["B", "M"]),
        ],
        # A program has 4 rows: 3 programs hold 9 rows, and each of 5 requests may leave one unfinished.
        (8, 2, [9, 5, 3, 17, 16, 2, 512, 128, 128, 0x3E000000, 7, 0x41F00000]),
    ),
    "ProcessLogits": (
        [
            (F32, ["R", 32000]), (I64, ["R"]), (I32, ["P", "M"]), (I64, ["P", "M"]),
            (F32, ["T"]), (I32, ["B"]), (F32, ["S"]), (F32, ["N"]),
        ],
        (6, 1, [32000, 3, 2, 9, 5, 7, 17]),
    ),
    "ProcessLogitsConstrained": (
        [
            (F32, ["R", 32000]), (I64, ["R"]), (I32, ["R", "B"]), (I64, ["R"]), (F32, ["R", 3]), (I32, ["R", "T"]),
            (F32, ["R", "T"]), (I32, ["P", "M"]), (I64, ["P", "M"]), (I32, ["R", 1000]),
            (F32, ["T"]), (I32, ["B"]), (F32, ["S"]), (F32, ["N"]),
        ],
        (6, 1, [32000, 5, 3, 9, 3, 2, 1000, 9, 5, 7, 17]),
    ),
    "SpecAccept": ([(I64, ["B", 4]), (I64, ["B", 3]), (I32, ["B"]), (I32, ["B"]), (BOOL, ["B"])], (5, 1, [3])),
    "SpecSample": ([(F32, ["R", 32000]), (BOOL, ["R"]), (I64, ["S"]), (I64, ["R"])], (6, 1, [32000, 7])),
    "SpecSampleVocab": (
        [(F32, ["R", "V"]), (BOOL, ["R"]), (I64, ["S"]), (I64, ["R"]), (I64, ["V"])],
        (6, 1, [999, 7]),
    ),
    "KvCompact": (
        [(BF16, ["N", 16, 2, 64 * 5]), (BF16, ["N", 16, 2, 64 * 5]), (I32, ["B", "M"]), (I32, ["B"]), (I64, ["B", 4])],
        (5, 3, [3, 17, 16, 640, 4]),  # 256 elements of a row per program
    ),
    # A program has 16 rows and 64 columns; a step has 64 inputs.
    "LinearLogits": ([(BF16, ["N", 192]), (BF16, [999, 192])], (2, 16, [17, 999, 192, 192, 3])),
    "QuantizeGroups": ([(BF16, ["N", 1152])], (17, 2, [9, 1152])),  # 8 of 9 groups in a program
    "GroupsLinear": (
        [
            (BF16, ["N", 256]), (I32, ["N", 64]), (F32, ["N", 2]), (I32, ["N", 2]),
            (I32, [3, 32, 32]), (torch.float16, [3, 2, 32]), (I32, [3, 2, 8]), (BF16, [70]),
        ],
        (2, 3, [17, 70, 256]),  # 16 rows and 32 columns of a program
    ),
}  # fmt: skip
LAUNCHES["SpecAttentionChained"] = LAUNCHES["SpecAttention"]
ATTRIBUTES: dict[str, Any] = {
    f"SpecAttention{chained}": {"scale": 0.125, "window": 7, "softcap": 30.0} for chained in ("", "Chained")
}
ATTRIBUTES |= {"QuantizeGroups": {"group": 128}, "GroupsLinear": {"bits": 4}}
SIZES = {"B": 5, "R": 6, "S": 7, "V": 999, "T": 9, "N": 17, "B1": 6, "M": 3, "P": 2}


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSPEC_TENSORRT_PLUGIN_DIR", str(tmp_path_factory.mktemp("ptx")))
        patch.setenv("TRTSPEC_CUDA_ARCH", "sm_90")
        yield build.build(ARCHITECTURES, NAMES)


def ptx(built: dict[str, Any], key: str) -> str:
    return (build.folder() / built[key].file).read_text(encoding="utf-8")


@pytest.fixture(params=[f"{name}-{arch}" for name in NAMES for arch in ARCHITECTURES])
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_table_of_kernels_is_complete() -> None:
    assert set(FULL_NAMES) == set(LAUNCHES) == set(PLUGINS)


def test_kernels_take_inputs_then_integers_then_outputs(built: dict[str, Any], key: str) -> None:
    """Kernels take inputs, integers and outputs in this order and nothing else: TensorRT passes just these."""
    name = key.split("-")[0]
    declared = re.search(r"\.entry \w+\((.*?)\)", ptx(built, key), re.DOTALL)
    assert declared is not None
    pointers = [".u64" in line for line in declared[1].split(",")]
    assert len(pointers) == built[key].parameters
    inputs, integers = len(PLUGINS[name].inputs), len(LAUNCHES[name][1][2])
    outputs = {"SpecAttention": 3, "SpecAccept": 2, "KvCompact": 2, "QuantizeGroups": 3}.get(name, 1)
    assert pointers == [True] * inputs + [False] * integers + [True] * outputs
    assert tuple(kernel(key.rsplit("-", 1)[0]).signature)[:inputs] == PLUGINS[name].inputs


@pytest.mark.parametrize("name", ["SpecSample", "SpecSampleVocab"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_rounding_of_the_noise_is_written_out(built: dict[str, Any], name: str, architecture: str) -> None:
    """Every rounding of the noise is written out, and nothing is approximated.

    When the driver compiles the PTX, it may fuse mul.f32 without a rounding with the addition after it. Approximations
    give another result.
    """
    code = ptx(built, f"{name}-{architecture}")
    arithmetic = re.findall(r"^\s+((?:add|sub|mul|fma|mad|div|lg2|ex2|rcp)\.\S*f32)", code, re.MULTILINE)
    assert set(arithmetic) == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_divided_as_the_reference_divides(built: dict[str, Any], architecture: str) -> None:
    """Logits are divided as in the reference, with roundings that nothing fuses.

    So one row's roundings are the same everywhere in a batch.
    """
    for name, further in (("ProcessLogits", set()), ("ProcessLogitsConstrained", {"add.rn.f32"})):
        code = ptx(built, f"{name}-{architecture}")
        arithmetic = re.findall(r"^\s+((?:add|sub|mul|fma|mad|div|lg2|ex2|rcp)\.\S*f32)", code, re.MULTILINE)
        assert set(arithmetic) == {"sub.rn.f32", "mul.rn.f32", "div.rn.f32", "ex2.approx.f32"} | further


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_read_again_after_all_threads_have_written_them(built: dict[str, Any], architecture: str) -> None:
    """The block waits before bans are written over the row, and again before the row is searched.

    The last writes are each thread's own.
    """
    code = re.findall(r"\b(ld\.global|bar\.sync|st\.global)", ptx(built, f"ProcessLogits-{architecture}"))
    divided, banned, *searched, filtered = " ".join(code).split("bar.sync")
    assert "st.global" in divided
    assert re.fullmatch(r" (ld\.global )+(st\.global )+", banned)
    assert "st.global" not in "".join(searched)
    assert re.fullmatch(r" (ld\.global )+(st\.global ?)+", filtered)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_marks_are_set_between_two_barriers(built: dict[str, Any], architecture: str) -> None:
    """The block waits after marks are cleared, after they are set, and after each of the two writes over them.

    Nothing else of the kernel is atomic.
    """
    code = re.findall(
        r"\b(ld\.global|bar\.sync|st\.global|atom\.global|red\.global)", ptx(built, f"{CONSTRAINED}-{architecture}")
    )
    cleared, marked, replaced, biased, *rest = " ".join(code).split("bar.sync")
    assert "st.global" in cleared
    assert re.fullmatch(r"( ld\.global| atom\.global| red\.global)+ ", marked)
    assert len(re.findall(r"atom|red", marked)) >= 3
    for written in (replaced, biased):
        assert re.fullmatch(r"( ld\.global)+( st\.global)+ ", written)
    assert not re.search(r"atom|red\.", "".join((cleared, replaced, biased, *rest)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compaction_stores_nothing_before_all_is_loaded(built: dict[str, Any], architecture: str) -> None:
    """Compaction stores nothing before all is loaded.

    Some threads load a row and others store over it, so the whole block waits in between.
    """
    code = re.findall(r"\b(ld\.global|bar\.sync|st\.global)", ptx(built, f"{COMPACTION}-{architecture}"))
    barrier = len(code) - 1 - code[::-1].index("bar.sync")
    assert "st.global" not in code[:barrier]
    assert set(code[barrier + 1 :]) == {"st.global"}


def test_an_assembler_takes_the_ptx(built: dict[str, Any], key: str, tmp_path: Path) -> None:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = tools / ("ptxas-blackwell" if key.endswith("sm_120") else "ptxas")
    source = build.folder() / built[key].file
    command = [assembler, f"--gpu-name={built[key].target}", "-v", source, "-o", tmp_path / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
    assert (tmp_path / "kernel.cubin").stat().st_size > 0


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_are_created_ahead_of_time(name: str) -> None:
    plugin = create(name, ATTRIBUTES.get(name, {}), trt.QuickPluginCreationRequest.STRICT_AOT)
    assert type(plugin).__name__ == "_TemplateAOTPlugin"


def launched(plugin: Any, inputs: list[Any]) -> tuple[dict[str, int], list[int], str, str]:
    """Return (launch parameters, integers, entry, PTX) by TensorRT's own get_launch_params and get_kernel."""
    dtypes, shapes = [dtype for dtype, _ in inputs], [shape for _, shape in inputs]
    concrete = [torch.empty([SIZES.get(size, size) for size in shape], dtype=dtype) for dtype, shape in inputs]
    sizes = [[size.at(SIZES) for size in shape] for shape in output_shapes(plugin, dtypes, shapes)]
    types = plugin.get_output_data_types([TRT_DTYPES[dtype] for dtype in dtypes], [len(shape) for shape in shapes])
    spelled = {trt_dtype: dtype for dtype, trt_dtype in TRT_DTYPES.items()}
    outputs = [torch.empty(shape, dtype=spelled[kind]) for shape, kind in zip(sizes, types, strict=True)]
    descriptions = []
    for tensor in (*concrete, *outputs):
        dynamic = trt.DynamicPluginTensorDesc()
        dynamic.desc = describe(tensor)
        descriptions.append(dynamic)
    launch, extra = SimpleNamespace(), _Arguments()
    plugin.set_tactic(0)
    with expressions() as builder:
        dimensions = [[Dimension(size) for size in shape] for shape in shapes]
        plugin.get_launch_params(dimensions, descriptions, len(inputs), launch, extra, builder)
    entry, code = plugin.get_kernel([describe(tensor) for tensor in concrete], [describe(tensor) for tensor in outputs])
    integers = [extra[index].expr.at(SIZES) for index in range(extra.nbSymExprs)]
    return {key: value.expr.at(SIZES) for key, value in vars(launch).items()}, integers, entry, code.decode()


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_those_of_the_shapes(built: dict[str, Any], name: str) -> None:
    inputs, (grid, heads, integers) = LAUNCHES[name]
    plugin = create(name, ATTRIBUTES.get(name, {}), trt.QuickPluginCreationRequest.STRICT_AOT)
    launch, passed, entry, code = launched(plugin, inputs)
    line = built[f"{FULL_NAMES[name]}-sm_90"]
    assert launch == {
        "grid_x": grid, "grid_y": heads, "grid_z": 1, "block_x": line.num_threads, "block_y": 1, "block_z": 1,
        "shared_mem": line.shared_bytes,
    }  # fmt: skip
    assert passed == integers
    assert f".entry {entry}(" in code
    assert re.search(r"^\.reqntid (\d+)", code, re.MULTILINE)[1] == str(line.num_threads)


def test_compaction_refuses_what_no_kernel_can_be_chosen_for() -> None:
    plugin = create("KvCompact", {}, trt.QuickPluginCreationRequest.STRICT_AOT)
    [k_cache, v_cache, *metadata, (_, path)], _ = LAUNCHES["KvCompact"]
    with pytest.raises(ValueError, match="a fixed length of path"):
        launched(plugin, [k_cache, v_cache, *metadata, (I64, ["B", "M"])])
    with pytest.raises(TypeError, match=r"caches of FLOAT, HALF or BF16: DataType\.INT32"):
        launched(plugin, [(I32, k_cache[1]), (I32, v_cache[1]), *metadata, (I64, path)])
    with pytest.raises(LookupError, match="KvCompact-bf16-l16 is not compiled for sm_90: run"):
        launched(plugin, [k_cache, v_cache, *metadata, (I64, ["B", 9])])


class _Arguments(dict[int, Any]):
    nbSymExprs = 0


# --- the build ------------------------------------------------------------------------------------------------------


def test_building_again_does_nothing_until_a_source_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    build.build(["sm_90"], NAMES, lines.append)
    assert lines == [f"{name}-sm_90 is up to date" for name in NAMES]
    monkeypatch.setattr(build, "sources_digest", lambda: "0" * 16)
    with pytest.raises(LookupError, match="was compiled from other sources"):
        build.compiled_for("SpecAccept", "sm_90")


def test_a_missing_file_is_compiled_again(built: dict[str, Any]) -> None:
    path = build.folder() / built["SpecAccept-sm_80"].file
    before = path.read_text(encoding="utf-8")
    path.unlink()
    lines: list[str] = []
    build.build(["sm_80"], NAMES, lines.append)
    assert [line for line in lines if "up to date" not in line] == [
        "compiled SpecAccept-sm_80: sm_80, 32 threads a block"
    ]
    assert path.read_text(encoding="utf-8") == before


def test_ptx_of_an_older_gpu_serves_a_newer_one_if_it_may() -> None:
    assert build.compiled_for("SpecAccept", "sm_90").target == "sm_90a"
    assert build.compiled_for("SpecAccept", "sm_89").target == "sm_80"
    assert build.compiled_for("SpecAccept", "sm_103").target == "sm_80"  # sm_90a runs on 9.0 alone
    with pytest.raises(LookupError, match=r"compiled for sm_75: run build_scripts/build_plugins\.py --target"):
        build.compiled_for("SpecAccept", "sm_75")


@pytest.mark.parametrize("shape", ["bf16-d128-g4", "bf16-d128-g8", "bf16-d256-g8", "fp32-d128-g4"])
def test_attention_takes_no_more_shared_memory_than_every_launcher_grants(shape: str) -> None:
    binary = compile_kernel(kernel(f"SpecAttention-{shape}"), "sm_90", ptx_version=build.PTX_VERSION)
    assert binary.shared_bytes <= 48 * 1024


def test_a_kernel_with_more_shared_memory_is_refused() -> None:
    with pytest.raises(build.BuildError, match="bytes of shared memory, and TensorRT is not known to give"):
        build.build(["sm_90"], ["SpecAttention-fp32-d256-g8"])


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(build.BuildError, match="hopper: an architecture is written like sm_90"):
        build.build(["hopper"])
    with pytest.raises(
        build.BuildError,
        match="no such kernel: SpecAttention-d64: there are ProcessLogits, ProcessLogitsConstrained, SpecAccept",
    ):
        build.build(["sm_90"], ["SpecAttention-d64"])
    with pytest.raises(
        build.BuildError,
        match="no such kernel: KvCompact-bf16-l7: there are ProcessLogits, ProcessLogitsConstrained, SpecAccept",
    ):
        build.build(["sm_90"], ["KvCompact-bf16-l7"])


def test_hidden_parameters_that_are_used_are_refused() -> None:
    code = ".visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1,\n.param .u64 k_param_2\n)\n{ %s }"
    assert "k_param_1" not in build.without_hidden_parameters(code % "ld [k_param_0];", 1)
    for body, parameters in (("ld [k_param_2];", 1), ("", 2), ("", 0)):
        with pytest.raises(build.BuildError, match=r"install triton==3\.9\.0"):
            build.without_hidden_parameters(code % body, parameters)


def test_the_script_builds_and_says_what_is_missing(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "build_scripts/build_plugins.py"), "--target", "tensorrt", "--arch", "sm_80"]
    script += ["--kernels", "SpecAccept", ATTENTION]
    environment = {**os.environ, "TRTSPEC_TENSORRT_PLUGIN_DIR": str(tmp_path)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"compiled {key}: sm_80, {line['num_threads']} threads a block"
        for key, line in json.loads((tmp_path / "manifest.json").read_text()).items()
    ]
    hidden = tmp_path / "triton"  # a package that cannot be imported stands before the real one
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('hidden')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(script, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Triton is missing (hidden): pip install 'trtspec[triton]'" in done.stderr
    shutil.rmtree(hidden)


def test_without_a_gpu_the_architecture_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtspec_plugins.tensorrt.device import architecture

    monkeypatch.delenv("TRTSPEC_CUDA_ARCH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="set TRTSPEC_CUDA_ARCH"):
        architecture()
