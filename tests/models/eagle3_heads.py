"""An EAGLE3 head for a target of 8 layers, and engines that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.head_checkpoints import make_eagle3
from tests.models.paper_heads import VOCAB, K
from trtspec import LLM
from trtspec.backends.eager import EagerExecutable
from trtspec.engine.stats import TimedExecutable
from trtspec.methods.step import OneEngineStep

Tensors = dict[str, Tensor]
SOME_IDS = [int(i) for i in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:83]]
"""83 of the target's 199 ids in random order: d2t has gaps and goes up and down."""
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": K}

LAYERS = 8


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 layers."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=LAYERS, initializer_range=0.06)


def eagle_step(llm: LLM) -> OneEngineStep:
    timed = llm.engine.loop.target
    assert isinstance(timed, TimedExecutable)
    assert isinstance(timed.inner, EagerExecutable)
    assert isinstance(timed.inner.step, OneEngineStep)
    return timed.inner.step


@pytest.fixture
def head(tmp_path: Path, deep: Path) -> Path:
    return make_eagle3(tmp_path, deep, (0, 3, 7), SOME_IDS)


def build_step(deep: Path, head: Path, **wishes: Any) -> OneEngineStep:
    """Build the step with its weights as loaded; with kernels they would be packed."""
    with (
        mock.patch("trtspec.build.wiring.load_plugins", return_value={}),
        LLM(deep, {**EAGLE3, "model": str(head), **wishes}) as llm,
    ):
        return eagle_step(llm)
