"""Which GPU an engine's kernels are for."""

from __future__ import annotations

import os


def architecture() -> str:
    """$TRTSPEC_CUDA_ARCH ("sm_90"), or that of the GPU that torch sees. RuntimeError where there is neither."""
    asked = os.environ.get("TRTSPEC_CUDA_ARCH")
    if asked:
        return asked
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU to compile an engine for: set TRTSPEC_CUDA_ARCH (sm_90, say)")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
