"""A target for heads of the original EAGLE, and functions that change a head's config and tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.models.paper_heads import K

EAGLE = {"method": "eagle", "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", initializer_range=0.06)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)
