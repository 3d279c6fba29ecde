"""Check what a library of C++ kernels depends on: torch's stable C functions, the C and C++ run-time libraries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NEEDED = re.compile(r"(libtorch_cpu|libstdc\+\+|libm|libgcc_s|libc|libpthread|ld-linux[\w-]*)\.so(\.\d+)*")
"""Libraries that a library of kernels may name."""

STABLE = re.compile(r"aoti_torch_\w+|torch_[a-z]\w*")
"""Functions of torch that keep their signatures from version to version."""

FOREIGN = re.compile(r"_?Py[A-Z_]\w*|_Z\w*?(?<!\d)(2at|3c10|5torch|8pybind11)\w*|(GOMP|omp)_\w+")
"""Functions of Python, C++ functions of torch, functions of OpenMP: a library of kernels must call none of them."""


def undefined(library: Path) -> list[str]:
    """Names that the library needs of other libraries, without their versions. Needs nm of binutils."""
    done = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1].split("@")[0] for line in done.stdout.splitlines()]


def needed(library: Path) -> list[str]:
    """File names of the libraries that the library names. Needs readelf of binutils."""
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\)[^\[]*\[([^\]]+)\]", done.stdout)


def instruction_sets(library: Path) -> set[str]:
    """Names of the instruction sets that the library has kernels for. The library must not be stripped."""
    done = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    return set(re.findall(r" trtspec::(\w+)::table$", done.stdout, re.MULTILINE))


def complaints(library: Path) -> list[str]:
    """Reasons why the library would not run with another torch; empty if it does."""
    names = undefined(library)
    wrong = [f"it wants {name}" for name in names if FOREIGN.fullmatch(name)]
    wrong += [f"it names {name}" for name in needed(library) if not NEEDED.fullmatch(name)]
    if not any(STABLE.fullmatch(name) for name in names):
        wrong.append("it calls nothing of torch's: are these the kernels?")
    return wrong
