"""Compile exported programs to .pt2 files: Inductor writes C++ in this thread while compilers run in parallel.

Inductor alone would compile one graph after the other, and AOTInductor's runtime with each graph. Here the runtime is
compiled once. Objects stay in Inductor's cache folder (TORCHINDUCTOR_CACHE_DIR), so that the same C++ is compiled once
on a machine. They stay nowhere if others may write to that folder, as objects are code that is run.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.resources
import json
import os
import shlex
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import package_pt2
from typing_extensions import Self

from trtspec.backends.aoti.loops import MARKING, share_loops
from trtspec.errors import EngineError

INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,  # weights are stored once, outside the graphs
    "emulate_precision_casts": True,  # round to bf16 where eager does
    "pattern_matcher": False,  # its patterns do not occur in these graphs
    "cpp.vec_isa_ok": True,  # compilers know the processor's vectors; a probe costs as much as a graph
    "cpp.threads": 1,  # else loops wake OpenMP's threads; loops.py overrides it if the kernels are built
}
_VECTORS = {"cpp.vec_isa_ok": INDUCTOR["cpp.vec_isa_ok"]}
_NOT_FOR_US = {"g1", "fno-omit-frame-pointer", "O3", "Wall", "pedantic"}  # Inductor's flags to leave out
# Inductor puts the runtime's text into each graph's source. We compile the runtime and its base class once.
_BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
_INCLUDE = "#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
# In a source the kernels come after the code that calls them. Each kernel begins with the include _KERNEL.
_KERNEL, _BEFORE_KERNELS = "#include <torch/csrc/inductor/cpp_prefix.h>\n", "} // namespace torch::aot_inductor"
_INSTEAD = f"#include <torch/csrc/inductor/aoti_runtime/model.h>\n#include <sstream>\nextern {_BASE}"


@dataclass(frozen=True)
class _Written:
    """The files that Inductor wrote for a graph. files: those that go into the package in addition to the library."""

    source: Path
    objects: tuple[Path, ...]
    files: tuple[str, ...]
    compiling: Mapping[str, Any]  # the compiler, definitions, cflags, ...
    linking: Mapping[str, Any]


class GraphCompiler:
    """A context manager that compiles programs for the CPU. All files are complete when it exits.

    direct: op overload -> declarations of C functions that graphs call instead; loops then run on the plugin's threads.
    EngineError if a compiler fails.
    """

    def __init__(self, direct: Mapping[Any, list[str]]) -> None:
        only_cpp = {"package": True, "package_cpp_only": True, "precompile_headers": False}
        self._options = {
            **INDUCTOR,
            **{f"aot_inductor.{name}": value for name, value in only_cpp.items()},
            "aot_inductor.custom_ops_to_c_shims": direct,
            **(MARKING if direct else {}),
        }
        self._share = share_loops if direct else str
        self._pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1))
        self._linker = ThreadPoolExecutor(1)  # waits for the compilers
        self._scratch = tempfile.TemporaryDirectory(prefix="trtspec-")
        self._folder = Path(self._scratch.name)
        self._jobs: list[Future[None]] = []
        self._sources = 0
        runtime = importlib.resources.files("torch._inductor") / "codegen" / "aoti_runtime" / "interface.cpp"
        self._runtime = runtime.read_text(encoding="utf-8") if runtime.is_file() else ""
        self._common: Future[Path] | None = None

    def __enter__(self) -> Self:
        # imports of _probe_compiler, which two threads must not run at the same time
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        self._probes = self._pool.submit(_probe_compiler)  # runs while the first program is made
        return self

    def add(self, program: ExportedProgram, file: Path) -> None:
        """Compile `program` to `file`, whose folder exists. EngineError if a compiler failed on an earlier program."""
        self._probes.result()
        for job in self._jobs:
            if job.done():
                job.result()
        if self._common is None:
            self._common = self._compile_runtime()
        written = self._write(program)
        source = written.source.read_text(encoding="utf-8")
        parts = [self._common] if self._runtime and self._runtime in source else []
        source = source.replace(self._runtime, _INSTEAD, 1) if parts else source
        calls, mark, kernels = source.partition(_KERNEL)
        kernels = self._share(mark + kernels) if mark else ""
        if mark and calls.rstrip().endswith(_BEFORE_KERNELS):  # two files, compiled at the same time
            parts += [self._compile(calls, written, "-O1"), self._compile(kernels, written)]
        else:
            parts.append(self._compile(calls + kernels, written))
        self._jobs.append(self._linker.submit(self._link, written, parts, file))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for job in self._jobs:
                    job.result()
        finally:
            for pool in (self._pool, self._linker):
                pool.shutdown(cancel_futures=True)
            self._scratch.cleanup()

    def _write(self, program: ExportedProgram) -> _Written:
        """Let Inductor write the C++ of a program. Inductor calls the compiler to assemble an empty file of weights."""
        arguments, keywords = program.example_inputs
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = program.module(check_guards=False)
            with _without_gc(), _compiler_failures():
                made: Any = torch._inductor.aot_compile(module, arguments, keywords, options=self._options)
        files = [Path(str(file)) for file in made if str(file)]
        of = {kind: [file for file in files if file.name.endswith(kind)] for kind in (".cpp", ".o", "_flags.json")}
        compiling, linking = map(_read_flags, sorted(of["_flags.json"]))
        left_out = {*of[".cpp"], *of[".o"], *of["_flags.json"]}
        rest = tuple(str(file) for file in files if file not in left_out and file.suffix == ".json")
        return _Written(of[".cpp"][0], tuple(of[".o"]), rest, compiling, linking)

    def _compile_runtime(self) -> Future[Path]:
        """Compile AOTInductor's runtime, with the flags that Inductor uses for a graph of one addition."""
        written = self._write(torch.export.export(_One(), (torch.zeros(2),), strict=False))
        return self._compile(_INCLUDE + self._runtime + _BASE, written, "-O1")

    def _compile(self, source: str, written: _Written, *flags: str) -> Future[Path]:
        """Compile `source` to an object file, with the graph's flags and `flags`, unless the cache folder has it."""
        file = self._folder / f"{self._sources}.cpp"
        self._sources += 1
        file.write_text(source, encoding="utf-8")
        command = [written.compiling["compiler"], *_compile_flags(written.compiling), *flags]
        kept = (_kept_objects() or self._folder) / _object_name(source, command)

        def compile_it() -> Path:
            if not kept.is_file():
                with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                    made = Path(scratch) / kept.name
                    _run([*command, "-c", str(file), "-o", str(made)])
                    made.replace(kept)
            return kept

        return self._pool.submit(compile_it)

    def _link(self, written: _Written, parts: Sequence[Future[Path]], file: Path) -> None:
        """Link a graph's objects and package the library into `file`."""
        objects = [*written.objects, *(part.result() for part in parts)]
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            library = Path(scratch) / f"{written.source.stem}.so"
            command = [written.compiling["compiler"], "-shared", "-o", str(library), *map(str, objects)]
            _run([*command, *_link_flags(written.linking)])
            package_pt2(str(file), aoti_files=[*written.files, str(library)])


def _read_flags(file: Path, seconds: float = 10.0) -> Any:
    """Read flags from Inductor's cache folder. Another process that compiles the same graph may be rewriting them.

    EngineError if they are incomplete for so long.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            if time.monotonic() > until:
                raise EngineError(f"{file} is damaged ({error}); delete it and build again") from error
        time.sleep(0.02)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection, which would spend a tenth of the time on garbage of a compiler that ends soon."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _probe_compiler() -> None:
    """Let Inductor probe with the compiler what other vector sets the processor has, and cache the result."""
    with torch._inductor.config.patch(_VECTORS):
        torch._inductor.cpu_vec_isa.valid_vec_isa_list()


class _One(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _compile_flags(told: Mapping[str, Any]) -> list[str]:
    flags = ["-O2", "-w", *(f"-{flag}" for flag in told["cflags"] if flag not in _NOT_FOR_US)]
    flags += [f"-D{name.strip()}" for name in told["definitions"]] + [f"-I{folder}" for folder in told["include_dirs"]]
    return flags + shlex.split(" ".join(told["passthrough_args"]))


def _link_flags(told: Mapping[str, Any]) -> list[str]:
    flags = [f"-{flag}" for flag in told["ldflags"]] + [f"-L{folder}" for folder in told["libraries_dirs"]]
    return [*flags, *(f"-l{name}" for name in told["libraries"]), "-fopenmp"]


def _kept_objects() -> Path | None:
    """Folder of objects in Inductor's cache folder; None if it cannot be made or another user may write to either."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache = Path(cache_dir())
    folder = cache / "trtspec"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    for found in (cache.lstat(), folder.lstat()):
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return None
    return folder


def _object_name(source: str, command: Sequence[str]) -> str:
    """Name of the object file of `source`: a digest of all that the object depends on.

    These are source, command, compiler, processor and torch's version. Comment lines are left out, as Inductor lists
    its own commands in them.
    """
    lines = [line for line in source.splitlines() if line and not line.startswith("//")]
    parts = (*lines, *command, _predefined(*command), str(torch.__version__))
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.o"


@functools.cache
def _predefined(*command: str) -> str:
    """Macros that the compiler itself defines: they name its version and the processor's features that it uses."""
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull])


def _run(command: list[str]) -> str:
    """Run a compiler and return its output. EngineError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why = done.stderr.strip()[-2000:] or f"exit status {done.returncode}" if done.returncode else ""
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise _failure(command[0], why)
    return done.stdout


@contextmanager
def _compiler_failures() -> Iterator[None]:
    """Raise EngineError if a compiler fails that Inductor runs within this context."""
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        yield
    except InductorError as error:
        cause = error.inner_exception
        if not isinstance(cause, CppCompileError):
            raise
        raise _failure(cause.cmd[0], cause.output.strip()[-2000:]) from error


def _failure(compiler: str, why: str) -> EngineError:
    return EngineError(f"{compiler} failed on a graph ({why}); install g++ 11 or newer, or set CXX")
