"""The GPU architecture for which an engine's kernels are compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_oldest: str | None = None  # not of a thread: TensorRT may ask for kernels in threads of its own


@contextmanager
def oldest(wanted: str | None) -> Iterator[None]:
    """Let kernels be those of this architecture ("sm_80"), which run on later ones too; None changes nothing."""
    global _oldest
    _oldest, before = wanted, _oldest
    try:
        yield
    finally:
        _oldest = before


def architecture() -> str:
    """The architecture whose kernels an engine gets, such as "sm_90".

    That of `oldest`, or else $TRTSPEC_CUDA_ARCH, or else that of the GPU that torch sees. RuntimeError without any.
    """
    if _oldest is not None:
        return _oldest
    asked = os.environ.get("TRTSPEC_CUDA_ARCH")
    if asked:
        return asked
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU to compile an engine for: set TRTSPEC_CUDA_ARCH (sm_90, say)")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())
