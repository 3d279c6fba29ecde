"""What the tests of this folder are run on: the GPU that torch sees first. Where there is none they are skipped, and
test_selfcheck.py runs a part of what they call on the CPU."""

from __future__ import annotations

import torch

from trtspec.backends.cuda.device import open_gpu
from trtspec.errors import DependencyError, UnsupportedError

CUDA = torch.device("cuda")


def why_not() -> str:
    """Why nothing here can run; "" where it can."""
    try:
        open_gpu()
    except (DependencyError, UnsupportedError) as error:
        return f"tests/gpu wants a GPU: {error}"
    return ""


WHY_NOT = why_not()
