"""The launches of the Triton kernels, compiled for GPUs that are not present (without TRITON_INTERPRET)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: pip install 'trtspec[triton]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from trtspec_plugins.triton import accept, sample
from trtspec_plugins.triton.compile import ARCHITECTURES, BuildError, Kernel, compile_kernel, main, number, report
from trtspec_plugins.triton.kernels import LAUNCHES, kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


QUICK = [
    (name, "sm_90a")
    for name in LAUNCHES
    if name == "packed_linear-fp32-fp8-prompt"
    or (
        "fp32" not in name
        and name.endswith(("-tree", "-bf16", "-fp8", "-int8", "process_logits", "-own-ids", "accept", "-l4"))
    )
]
REST = [
    (name, architecture) for name in LAUNCHES for architecture in ARCHITECTURES if (name, architecture) not in QUICK
]


@pytest.mark.parametrize(
    ("name", "architecture"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in REST)]
)
def test_launches_compile_into_registers(name: str, architecture: str) -> None:
    found = kernels(name)
    assert found
    for kernel in found:
        binary = compile_kernel(kernel, architecture)
        assert binary.fits, binary.figures()
        assert binary.target == architecture
        assert f".entry {binary.entry}(" in binary.ptx
        assert binary.cubin.startswith(b"\x7fELF")
        assert 0 < binary.registers <= 255
        assert binary.scratch_bytes == 0


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of_accept(monkeypatch: pytest.MonkeyPatch, K: int) -> Kernel:
    tokens = (empty(torch.int64, 2, K + 1), empty(torch.int64, 2, K))
    metadata = (empty(torch.int32, 2), empty(torch.int32, 2), empty(torch.bool, 2))
    monkeypatch.setitem(LAUNCHES, "a launch", lambda: accept.spec_accept(*tokens, *metadata))
    [kernel] = kernels("a launch")
    return kernel


def test_launches_are_specialised_as_triton_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 16 are known as such, 1 is a constant, and tensors that torch allocates are aligned."""
    kernel = launch_of_accept(monkeypatch, 3)
    assert kernel.signature["sampled"] == "*i64"
    assert kernel.signature["emits"] == "*u1"
    assert kernel.signature["K"] == "i32"
    assert "K" not in kernel.aligned
    assert set(kernel.signature) - {"K"} == set(kernel.aligned)
    assert kernel.constants == {"BLOCK": accept.BLOCK}
    assert "K" in launch_of_accept(monkeypatch, 16).aligned
    assert launch_of_accept(monkeypatch, 1).constants == {"K": 1, "BLOCK": accept.BLOCK}


def test_what_is_in_triton_s_cache_has_its_figures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launch_of_accept(monkeypatch, 3)
    assert compile_kernel(kernel, "sm_80") == compile_kernel(kernel, "sm_80")


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a launch whose kernel has too few registers."""

    def launch() -> None:
        metadata = (empty(torch.bool, 8), empty(torch.int64, 8), empty(torch.int64, 8))
        arguments = (empty(torch.float32, 8, 4096), *metadata, 4096, 8, empty(torch.int64, 8))
        sample.spec_sample_dense_kernel[(8,)](*arguments, OWN_IDS=False, BLOCK=4096, num_warps=4, maxnreg=32)

    monkeypatch.setitem(LAUNCHES, "crowded", launch)
    return "crowded"


def test_spills_are_counted_and_fail_the_build(crowded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sm_90"], [crowded, "spec_accept"]) == 1
    said = capsys.readouterr()
    header, first, second = said.out.splitlines()
    titles = header.split()
    spills = ["stack", "spill-stores", "spill-loads"]
    assert titles == ["launch", "kernel", "target", "threads", "registers", "shared", *spills]
    spilled, good = (dict(zip(titles, line.split(), strict=True)) for line in (first, second))
    assert [spilled["target"], spilled["threads"], spilled["registers"]] == ["sm_90a", "128", "32"]
    assert min(int(spilled[title]) for title in spills) > 0
    assert good["launch"] == "spec_accept"
    assert [good[title] for title in spills] == ["0"] * 3
    assert "shared memory: crowded (spec_sample_dense_kernel, sm_90a)\n" in said.err


def test_what_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launch_of_accept(monkeypatch, 3)
    broken = Kernel(kernel.function, kernel.signature, {"BLOCK": 33})  # not a power of two
    with pytest.raises(BuildError, match="did not compile spec_accept_kernel for sm_80: "):
        compile_kernel(broken, "sm_80")


def test_architectures_have_two_spellings() -> None:
    assert [number(name) for name in ARCHITECTURES] == [80, 90, 100, 120]
    assert number("sm_90") == number("sm_90a")
    with pytest.raises(BuildError, match="hopper: an architecture is written like sm_90"):
        report(["sm_80", "hopper"], ["spec_accept"], print)


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(BuildError, match=r"no such kernel: spec_except; there are .*spec_accept"):
        report(["sm_80"], ["spec_except"], print)


def test_the_interpreter_and_a_missing_triton_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert main(["sm_80"]) == 1
    assert "TRITON_INTERPRET=1 asks for the interpreter, which compiles nothing: unset it" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["sm_80"]) == 1
    assert "pip install 'trtspec[triton]'" in capsys.readouterr().err


@pytest.mark.long
def test_the_script_prints_a_line_for_each_kernel_and_architecture() -> None:
    script = [sys.executable, str(ROOT / "build_scripts/build_plugins.py"), "--target", "triton"]
    command = [*script, "--arch", "sm_80", "sm_120a", "--kernels", "spec_accept"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["spec_accept", "spec_accept_kernel", "sm_80"],
        ["spec_accept", "spec_accept_kernel", "sm_120a"],
    ]
    done = subprocess.run([*script, "--sanitize"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--sanitize is for --target cpu" in done.stderr
