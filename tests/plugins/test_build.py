"""Building and loading the C++ kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trtspec_plugins.cpu import build, graph_calls

from build_scripts import audit
from trtspec.ops import load_plugins

REPORT = "import logging; logging.basicConfig(); from trtspec.ops import load_plugins; print(load_plugins())"
DRAW = """
import torch; from trtspec.ops import spec_sample
none = torch.empty(0, dtype=torch.int64)
logits = torch.tensor([[0.0, 0, 0, 1], [0, 0, 1, 0]])
print(spec_sample(logits, torch.tensor([True, True]), none, torch.tensor([0, 0]), none))
from trtspec.ops.threads import kernel_threads
torch.set_num_threads(2)
with kernel_threads(): print(torch.get_num_threads(), "of torch's threads")
"""


def in_a_process(**environment: str) -> str:
    """Return what a fresh interpreter says of its kernels."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT + DRAW],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Kernels are loaded where there is a compiler; without them every other test of the kernels is skipped."""
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert "cpu" in load_plugins()


built = pytest.mark.skipif("cpu" not in load_plugins(), reason="the kernels are not built")


@built
def test_building_again_does_nothing() -> None:
    before = build.library().stat().st_mtime_ns
    lines: list[str] = []
    assert build.build(report=lines.append) == build.library()
    assert lines == [f"{build.library().name} is up to date"]
    assert build.library().stat().st_mtime_ns == before


@built
def test_another_instruction_set_can_be_asked_for() -> None:
    """Kernels of any instruction set have threads of their own."""
    said = in_a_process(TRTSPEC_CPU_ISA="portable")
    assert said.splitlines()[0] == "{'cpu': 'portable'}"
    assert "1 of torch's threads" in said


@built
def test_an_instruction_set_this_machine_lacks_is_named() -> None:
    said = in_a_process(TRTSPEC_CPU_ISA="avx1024")
    assert "TRTSPEC_CPU_ISA=avx1024 is not among what this machine runs: " in said
    assert "{}" in said
    assert "tensor([3, 2])" in said  # the reference draws
    assert "2 of torch's threads" in said


def test_a_relative_folder_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRTSPEC_PLUGIN_DIR", ".")
    assert build.library().parent == tmp_path


def test_plugins_can_be_switched_off() -> None:
    assert in_a_process(TRTSPEC_PLUGINS="0").splitlines()[0] == "{}"


def test_without_a_library_the_references_serve(tmp_path: Path) -> None:
    """Without a library the references serve; one line says so, and how to build the kernels."""
    said = in_a_process(TRTSPEC_PLUGIN_DIR=str(tmp_path))
    assert "the reference kernels do: not built for this version; run python -m trtspec_plugins.cpu" in said


@built
def test_the_installed_package_builds_its_kernels(tmp_path: Path) -> None:
    """The installed package builds its kernels from any folder, as it needs no checkout."""
    command = [sys.executable, "-m", "trtspec_plugins.cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("is up to date\n")


def test_without_a_compiler_the_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRTSPEC_PLUGIN_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "argv", ["build_plugins.py"])
    assert build.main() == 1
    assert "there is no C++ compiler; install g++" in capsys.readouterr().err


@built
def test_compiled_graphs_find_every_op_they_declare() -> None:
    declared = graph_calls()
    linears, sampling = {"packed_linear", "packed_embedding"}, {"process_logits", "spec_sample", "spec_accept"}
    layers = {"spec_attention_", "rms_norm", "rotate_heads", "packed_swiglu"}
    assert set(declared) == linears | sampling | layers | {"kv_compact_"}
    for name, line in declared.items():
        schema = getattr(torch.ops.trtspec, name).default._schema
        parameters = line[line.index("(") + 1 : -1].split(",")
        assert len(parameters) == len(schema.arguments) + max(len(schema.returns), 1)


@built
@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("readelf")), reason="there are no binutils")
def test_kernels_call_torchs_stable_functions_alone() -> None:
    """Kernels call only torch's stable functions, so one library serves every torch that pyproject.toml allows."""
    assert audit.complaints(build.library()) == []


@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("readelf")), reason="there are no binutils")
def test_the_audit_sees_torchs_own_unstable_functions() -> None:
    """The audit reports torch's Python bindings, which need everything that kernels may not call."""
    wrong = " ".join(audit.complaints(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    for name in ("PyObject_", "_ZN2at", "_ZN3c10", "_ZN5torch", "libc10.so"):
        assert name in wrong


@built
def test_the_library_is_the_same_for_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.library() == before
