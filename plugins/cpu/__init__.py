"""C++ kernels for the CPU, built by `python -m trtspec_plugins.cpu`."""

from __future__ import annotations

import ctypes
import os
import re

import torch
from trtspec_plugins.cpu.build import SOURCES, library


def load() -> str:
    """Register the kernels with torch. Returns the instruction set that they use, a name of build.INSTRUCTION_SETS.

    $TRTSPEC_CPU_ISA asks for one of these. ImportError if the kernels are not built or cannot run.
    $TRTSPEC_PLUGIN_SANITIZED=1 loads the build with --sanitize. It needs ASAN_OPTIONS=detect_leaks=0 and
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)".
    """
    path = library(sanitize=os.environ.get("TRTSPEC_PLUGIN_SANITIZED") == "1")
    if not path.is_file():
        raise ImportError("not built for this version; run python -m trtspec_plugins.cpu")
    shared = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled graphs find its functions by name
    shared.trtspec_cpu_isa.restype = ctypes.c_char_p
    name: str = shared.trtspec_cpu_isa().decode()
    if name.startswith("!"):
        raise ImportError(name[1:])
    torch.ops.load_library(path)
    return name


def graph_calls() -> dict[str, str]:
    """Op -> C declaration of the function that AOTInductor's graphs call for the op, without torch's dispatcher."""
    source = (SOURCES / "graph_calls.cpp").read_text(encoding="utf-8")
    pattern = r"AOTI_TORCH_EXPORT (AOTITorchError aoti_torch_cpu_(\w+)\([^)]*\))"
    return {name: " ".join(declaration.split()) for declaration, name in re.findall(pattern, source)}
