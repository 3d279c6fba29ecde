"""Compilers that fail on a graph, and the objects that are kept of those that succeed."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trtspec.backends.aoti import graph_compiler
from trtspec.backends.aoti.graph_compiler import GraphCompiler
from trtspec.errors import EngineError

COMPILER = shutil.which("g++")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def program() -> torch.export.ExportedProgram:
    return torch.export.export(Twice(), (torch.zeros(2),), strict=False)


def failing(folder: Path, on: str, how: str) -> Path:
    """A compiler that runs `how` if its arguments match `on`."""
    file = folder / "g++"
    file.write_text(f'#!/bin/sh\ncase "$*" in {on}) {how};; esac\nexec {COMPILER} "$@"\n')
    file.chmod(0o755)
    return file


def compile_twice(compiler: Path, folder: Path) -> None:
    """Compile two graphs. The second is added when the first has succeeded or failed."""
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}), GraphCompiler({}) as graphs:
        graphs.add(program(), folder / "a.pt2")
        wait(graphs._jobs)
        graphs.add(program(), folder / "b.pt2")
        pytest.fail("the failure of the first graph was not seen")


@pytest.mark.parametrize(
    ("on", "how", "why"),
    [
        ("*trtspec-*.cpp*", "echo this is no language of mine >&2; exit 1", "this is no language of mine"),
        ("*trtspec-*.cpp*", "exit 3", "exit status 3"),
        pytest.param("*-shared*", "exit 4", "exit status 4", marks=pytest.mark.long),
        ("*.weights.S*", "echo there is no assembler >&2; exit 1", "there is no assembler"),
    ],
)
def test_the_first_failure_ends_the_compilation(tmp_path: Path, on: str, how: str, why: str) -> None:
    compiler = failing(tmp_path, on, how)
    words = rf"{compiler.parent}/g\+\+ failed on a graph \({why}\); install g\+\+ 11 or newer, or set CXX"
    with pytest.raises(EngineError, match=words):
        compile_twice(compiler, tmp_path)
    assert not list(tmp_path.glob("*.pt2"))


def test_a_failure_of_the_last_graph_is_seen_at_the_end(tmp_path: Path) -> None:
    compiler = failing(tmp_path, "*trtspec-*.cpp*", "exit 1")
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}),
        pytest.raises(EngineError, match="exit status 1"),
        GraphCompiler({}) as graphs,
    ):
        graphs.add(program(), tmp_path / "a.pt2")


def test_a_compiler_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none/g\+\+ failed on a graph \(No such file or directory\); install g"):
        graph_compiler._run([str(tmp_path / "none" / "g++"), "-c", "a.cpp"])


def compiled(folder: Path, source: str) -> int:
    """Number of times that the compiler ran to make the object file of `source`, which is returned to two callers."""
    log = folder / "compiled"
    log.write_text("")
    compiler = failing(folder, "*trtspec-*.cpp*", f"echo x >> {log}")
    none: list[str] = []
    told = {"compiler": str(compiler), "cflags": none, "definitions": none, "include_dirs": none}
    written = graph_compiler._Written(Path(), (), (), {**told, "passthrough_args": none}, {})
    with GraphCompiler({}) as graphs:
        first, second = (graphs._compile(source, written).result() for _ in range(2))
    assert first == second
    assert first.read_bytes()[:4] == b"\x7fELF"
    return len(log.read_text().split())


def test_the_same_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert compiled(tmp_path, "int one() { return 1; }") == 1
    assert compiled(tmp_path, "int one() { return 1; }") == 0
    assert compiled(tmp_path, "int two() { return 2; }") == 1


def test_what_an_object_depends_on_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = graph_compiler._object_name
    one = kept("int a;\n", ["g++", "-O2"])
    assert kept("int a;\n\n// g++ -c a.cpp\n", ["g++", "-O2"]) == one
    assert kept("int b;\n", ["g++", "-O2"]) != one
    assert kept("int a;\n", ["g++", "-O1"]) != one
    monkeypatch.setattr(torch, "__version__", "1.0")
    other = kept("int a;\n", ["g++", "-O2"])
    assert other != one
    monkeypatch.setattr(graph_compiler, "_predefined", lambda *command: "another processor")
    assert kept("int a;\n", ["g++", "-O2"]) not in (one, other)


def test_objects_are_kept_where_nobody_else_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    assert graph_compiler._kept_objects() == cache / "trtspec"
    for folder in (cache, cache / "trtspec"):
        folder.chmod(0o777)
        assert graph_compiler._kept_objects() is None
        folder.chmod(0o755)
    assert graph_compiler._kept_objects() == cache / "trtspec"
    (cache / "trtspec").rename(tmp_path / "elsewhere")
    (cache / "trtspec").symlink_to(tmp_path / "elsewhere")
    assert graph_compiler._kept_objects() is None
    (cache / "trtspec").unlink()
    (cache / "trtspec").touch()
    assert graph_compiler._kept_objects() is None
    (cache / "trtspec").unlink()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert graph_compiler._kept_objects() is None


def test_an_object_that_was_not_finished_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiler = failing(tmp_path, "*trtspec-*.cpp*", 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; exit 1')
    with pytest.raises(EngineError, match="exit status 1"):
        compile_twice(compiler, tmp_path)
    assert not list((tmp_path / "cache" / "trtspec").rglob("*.o"))


def test_flags_that_another_process_is_writing_are_read_when_complete(tmp_path: Path) -> None:
    """Inductor empties the file of a graph that it compiles again, and then fills it."""
    file = tmp_path / "graph_compile_flags.json"
    file.write_text("")
    late = threading.Timer(0.2, file.write_text, ('{"compiler": "c++"}',))
    late.start()
    assert graph_compiler._read_flags(file) == {"compiler": "c++"}
    late.join()
    file.write_text('{"compiler"')
    with pytest.raises(EngineError, match=r"graph_compile_flags\.json is damaged .* delete it and build again"):
        graph_compiler._read_flags(file, seconds=0.1)
