"""Fused linears of integer weights, the matrices that they stand for, and a model in floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import Integers, Kind, rounded, stored
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader
from trtspec.models.layers import Linear
from trtspec.models.slots import Slot
from trtspec.models.weights import load_weights
from trtspec.ops.packing import unpack

bf16, fp32 = torch.bfloat16, torch.float32


class Fused(nn.Module):
    """Two linears of a checkpoint as one trtspec linear."""

    def __init__(self, widths: tuple[int, int], depth: int) -> None:
        super().__init__()
        self.both = Linear(depth, sum(widths), bias=False)
        self.slots = {
            "a.first.weight": Slot("both.weight", 0, (widths[0], depth)),
            "a.second.weight": Slot("both.weight", widths[0], (widths[1], depth)),
        }

    def load(self, tensors: dict[str, Tensor], config: dict[str, Any], folder: Path = Path("folder")) -> Linear:
        quantization = CheckpointQuantization.read(Reader({"quantization_config": config}, folder, "target"))
        load_weights(self, self.slots, tensors.items(), folder, "target", quantization)
        return self.both


def weights(kind: Kind, widths: tuple[int, int], depth: int, seed: int) -> tuple[list[Integers], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(depth, generator=generator) if kind.ordered else None
    made = [rounded(torch.randn(n, depth, generator=generator) / 8, kind, order) for n in widths]
    parts = zip(("a.first", "a.second"), made, strict=True)
    return made, {f"{name}.{end}": tensor for name, part in parts for end, tensor in stored(part, kind).items()}


def matrix_of(linear: Linear) -> Tensor:
    found = unpack(linear.weight, linear.scales, linear.zeros, linear.out_features, linear.in_features)
    return found[:, linear.order.argsort()] if linear.order.numel() else found


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "qwen2", **sizes, initializer_range=0.1)
