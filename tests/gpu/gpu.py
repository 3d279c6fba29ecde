"""The device of this folder's tests: the GPU that torch sees first.

Without a GPU the tests are skipped, and test_selfcheck.py runs a part of what they call on the CPU.
"""

from __future__ import annotations

import torch

from trtspec.backends.cuda.device import open_gpu
from trtspec.errors import DependencyError, UnsupportedError

CUDA = torch.device("cuda")


def why_not() -> str:
    """Reason why nothing here can run; "" if it can."""
    try:
        open_gpu()
    except (DependencyError, UnsupportedError) as error:
        return f"tests/gpu wants a GPU: {error}"
    return ""


WHY_NOT = why_not()
