"""Compile the C++ kernels: kernels.cpp once per instruction set, the bindings against torch, one shared library.

The library calls only torch's stable C functions (tensor.h), so it runs with every torch from TARGET on. Its name holds
the digest of its sources and flags: building again is a no-op until one of them changes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"

_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"portable": ()}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": ("-march=x86-64-v3",),
        "avx2_vnni": ("-march=x86-64-v3", "-mavxvnni"),
        "avx512": _V4,
        "avx512_vnni": (*_V4, "-mavx512vnni"),
        "avx512_bf16": (*_V4, "-mavx512bf16", "-mavx512vnni"),
        "amx": (*_V4, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    }
TARGET = "0x020d000000000000"  # torch 2.13, the oldest with the functions
FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wno-psabi",
    f"-DTORCH_TARGET_VERSION={TARGET}",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


class BuildError(Exception):
    """An error for kernels that could not be compiled. The message ends with what to do."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or clang++."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


def folder() -> Path:
    """Folder of the libraries: $TRTSPEC_PLUGIN_DIR, or `_build` next to the sources."""
    return Path(os.environ.get("TRTSPEC_PLUGIN_DIR") or Path(__file__).parent / "_build")


def library(sanitize: bool = False, into: Path | None = None) -> Path:
    """Path of the library that belongs to the present sources and flags, in `into` or else in folder().

    The library may not be built yet.
    """
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    flags = (FLAGS, sorted(INSTRUCTION_SETS.items()), SANITIZERS if sanitize else ())
    digest.update(repr((flags, platform.machine())).encode())
    name = f"libtrtspec_cpu-{digest.hexdigest()[:16]}{'-sanitized' if sanitize else ''}.so"
    return (into or folder()).absolute() / name  # the compiler runs elsewhere, and the loader needs a path


def build(sanitize: bool = False, report: Callable[[str], None] = lambda line: None, into: Path | None = None) -> Path:
    """Compile the library unless that is done already. Returns library(sanitize, into). Raises BuildError."""
    target = library(sanitize, into)
    if target.is_file():
        report(f"{target.name} is up to date")
        return target
    cxx = compiler()
    if cxx is None:
        raise BuildError("there is no C++ compiler; install g++ (apt install g++) or set CXX")
    torch_folder = _torch_folder()
    flags = [*FLAGS, *(SANITIZERS if sanitize else ())]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        jobs: list[tuple[str, list[str]]] = []
        for name, isa_flags in INSTRUCTION_SETS.items():
            jobs.append((f"kernels for {name}", ["kernels.cpp", f"-DTRTSPEC_ISA={name}", *isa_flags]))
        for source in sorted(SOURCES.glob("*.cpp")):
            if source.name != "kernels.cpp":
                jobs.append((source.name, [source.name, f"-I{torch_folder / 'include'}"]))

        def compile_one(job: tuple[int, tuple[str, list[str]]]) -> str:
            index, (what, arguments) = job
            object_file = f"{scratch}/{index}.o"
            _run([cxx, *flags, "-c", "-o", object_file, *arguments], SOURCES)
            report(f"compiled {what}")
            return object_file

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, enumerate(jobs)))
        linked = f"{scratch}/linked.so"
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
        _run([cxx, *flags, "-shared", "-o", linked, *objects, *libraries], SOURCES)
        os.replace(linked, target)  # atomically, so that no process loads half a library
    report(f"built {target}")
    return target


def _torch_folder() -> Path:
    """Folder of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch, whose headers they include, is not installed; pip install 'torch>=2.13'")
    return Path(spec.origin).parent


def _run(command: Iterable[str], where: Path) -> None:
    done = subprocess.run(list(command), cwd=where, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{' '.join(done.args)} failed:\n{done.stderr.strip()[-4000:]}\n"
            "if the compiler is older than g++ 11 or clang++ 14, install a newer one or set CXX"
        )


def main() -> int:
    """`python -m trtspec_plugins.cpu [--sanitize]`. build_scripts/build_plugins.py calls it too."""
    try:
        build(sanitize="--sanitize" in sys.argv[1:], report=print)
    except (BuildError, OSError) as error:
        print(f"the C++ kernels were not built, reference kernels serve instead: {error}", file=sys.stderr)
        return 1
    return 0
