"""Kernels in the Triton language, for NVIDIA GPUs. Each file has one op: the kernel, and a function that launches it.

The arguments of a kernel are in TensorRT's order: inputs, integers, outputs. So the same kernel, compiled ahead of
time, serves there (plugins/tensorrt/aot.py).
Compaction, sampling and acceptance give the references' results bit for bit. For this, enable_fp_fusion is off when
they are compiled: a fused multiply-add rounds once where the references round twice. Attention adds in an order of its
own. The filters of logits add exactly. Their results are the references', except for tokens within rounding errors of
an edge; filters.py has their steps.

Tests without a GPU show the kernels' results, in Triton's interpreter (TRITON_INTERPRET=1), and that they compile.
tests/gpu shows them on a GPU; an H100 has run it. benchmarks/results has times.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

OPS = {
    "spec_attention_": "attention",
    "process_logits": "logits",
    "packed_linear": "linear",
    "packed_embedding": "embedding",
    "rms_norm": "norm",
    "silu_mul": "elementwise",
    "rotate_heads": "elementwise",
    "spec_sample": "sample",
    "spec_accept": "accept",
    "kv_compact_": "compact",
}
"""Op -> the file here that has its launcher: a function of the op's name that takes the op's arguments."""

LEAST_CAPABILITY = (8, 0)
_libraries: list[torch.library.Library] = []  # registrations last as long as their library


def load() -> str:
    """Register the kernels with torch for CUDA. Returns what runs them, or "" if torch sees no GPU.

    TRTSPEC_TRITON=interpret in the environment registers them for the CPU instead, to run in Triton's interpreter. This
    is for debugging and tests, as it is too slow for use. It also needs TRITON_INTERPRET=1 and TRTSPEC_PLUGINS=triton;
    without the latter, the C++ kernels are registered for the CPU as well. ImportError if the kernels cannot run.
    """
    asked = os.environ.get("TRTSPEC_TRITON")
    if asked not in (None, "", "interpret"):
        raise ImportError(f"TRTSPEC_TRITON={asked}: it may be interpret, or not be set")
    if asked:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ImportError("TRTSPEC_TRITON=interpret wants TRITON_INTERPRET=1 in the environment, too")
        return f"interpreted, Triton {register('CPU')}"
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < LEAST_CAPABILITY:
        least = "sm_{}{}".format(*LEAST_CAPABILITY)
        raise ImportError(f"{torch.cuda.get_device_name()} is sm_{major}{minor}, and they want {least} or newer")
    return f"sm_{major}{minor}, Triton {register('CUDA')}"


def register(key: str) -> str:
    """Register the kernels for one of torch's dispatch keys. Returns Triton's version. ImportError without Triton."""
    version: str = import_triton().__version__
    launchers = {op: getattr(importlib.import_module(f"{__name__}.{module}"), op) for op, module in OPS.items()}
    library = torch.library.Library("trtspec", "IMPL")  # after all imports, so that all are registered or none
    _libraries.append(library)
    for op, launcher in launchers.items():
        library.impl(op, launcher, key)
    return version


def import_triton() -> ModuleType:
    """Return Triton, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(f"Triton is missing ({error}): pip install 'trtspec[triton]'") from error
