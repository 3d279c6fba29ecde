"""The GPU architecture for which an engine's kernels are compiled."""

from __future__ import annotations

import os


def architecture() -> str:
    """$TRTSPEC_CUDA_ARCH ("sm_90"), or the architecture of the GPU that torch sees. RuntimeError without either."""
    asked = os.environ.get("TRTSPEC_CUDA_ARCH")
    if asked:
        return asked
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU to compile an engine for: set TRTSPEC_CUDA_ARCH (sm_90, say)")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
