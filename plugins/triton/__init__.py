"""Kernels in the Triton language, for NVIDIA GPUs. Each file has one op: the kernel, and a function that launches it.

The order of a kernel's arguments is the one that TensorRT gives: inputs, integers, outputs, so that the same kernel,
compiled ahead of time, serves there (plugins/tensorrt/aot.py). Compaction, sampling and acceptance give the
references' results bit for bit: compile with enable_fp_fusion off, as a fused multiply-add rounds once where the
references round twice. Attention adds in an order of its own. The filters of logits add exactly, so that their results
are the references' but for tokens within rounding errors of an edge; their steps are in filters.py.

What is shown without a GPU: the kernels' results, in Triton's interpreter (TRITON_INTERPRET=1), and that they compile.
That the compiled kernels give the same results on a GPU is not, and none has been timed or tuned.
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
    "spec_sample": "sample",
    "spec_accept": "accept",
    "kv_compact_": "compact",
}
"""Op -> the file here whose function of that name, called with the op's arguments, launches its kernel."""

LEAST_CAPABILITY = (8, 0)
_libraries: list[torch.library.Library] = []  # what one registers lasts as long as it does


def load() -> str:
    """Register the kernels with torch for CUDA; returns what runs them, or "" where torch sees no GPU.

    TRTSPEC_TRITON=interpret in the environment registers them for the CPU instead, to run in Triton's interpreter: for
    debugging and tests, as it is slow beyond use. It wants TRITON_INTERPRET=1, too, and TRTSPEC_PLUGINS=triton, or the
    C++ kernels are registered for the CPU as well. ImportError where the kernels cannot run.
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
    """Register the kernels for one of torch's dispatch keys; returns Triton's version. ImportError without Triton."""
    version: str = import_triton().__version__
    launchers = {op: getattr(importlib.import_module(f"{__name__}.{module}"), op) for op, module in OPS.items()}
    library = torch.library.Library("trtspec", "IMPL")  # once all are there: a part of them would serve unannounced
    _libraries.append(library)
    for op, launcher in launchers.items():
        library.impl(op, launcher, key)
    return version


def import_triton() -> ModuleType:
    """Triton, or an ImportError that says how to get it."""
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(f"Triton is missing ({error}): pip install 'trtspec[triton]'") from error
