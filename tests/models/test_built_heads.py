"""Heads of every kind.

The row of each method names a class that can be opened. config.json is read only once.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoints import make_checkpoint, make_mimo
from tests.dspark_checkpoints import make_dspark
from tests.head_checkpoints import make_dflash, make_eagle, make_eagle3, make_medusa, make_mlp_speculator
from tests.models.built_heads import ROOMS, head_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.table import METHODS
from trtspec.models.weights import describe_decoder, load_decoder

# Method -> name of the function that reads config.json, and a function that makes a folder for a target.
FACTS: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "dflash": ("dflash.weights.DFlashConfig.of", lambda path, target: make_dflash(path, target, (0,), 7)),
    "dspark": ("dspark.weights.DSparkConfig.of", lambda path, target: make_dspark(path, target, (0,), 7)),
    "eagle": ("eagle.weights.EagleHeadConfig.of", make_eagle),
    "eagle3": (
        "eagle3.weights.Eagle3HeadConfig.of",
        lambda path, target: make_eagle3(path, target, None, num_captured=1),
    ),
    "medusa": ("medusa.weights.MedusaConfig.of", make_medusa),
    "mlp_speculator": ("mlp_speculator.weights.MLPSpeculatorConfig.of", make_mlp_speculator),
    "mtp": ("mtp.weights.require_mtp", lambda path, target: target),
}


@pytest.mark.parametrize("make", [load_decoder, describe_decoder])
@pytest.mark.parametrize("name", FACTS)
def test_config_json_is_understood_once(tmp_path: Path, name: str, make: Any) -> None:
    target = make_mimo(tmp_path) if name == "mtp" else make_checkpoint(tmp_path, "llama", name="target")
    path, make_head = FACTS[name]
    folder, decoder = make_head(tmp_path, target), make(ModelConfig.from_folder(target), torch.float32)
    path = f"trtspec.methods.{path}"
    with mock.patch(path, wraps=pkgutil.resolve_name(path)) as reads:
        head_of(name, folder, decoder, target)
    assert reads.call_count == 1


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.head is not None])
def test_the_row_of_a_method_names_a_room(name: str) -> None:
    head = METHODS[name].head
    assert head is not None
    assert head.open() in [kind for kind, _ in ROOMS.values()]
