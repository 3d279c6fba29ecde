"""Memory that a step takes in addition to its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from trtspec.backends.sizes import Sizes
from trtspec.methods.head import GATE_UP
from trtspec.methods.step import Step
from trtspec.models.layers import Linear


@dataclass(frozen=True)
class Activation:
    """A large tensor inside a launch of the largest size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, *shape: int) -> Activation:
        return cls(name, str(dtype).removeprefix("torch."), shape, prod(shape) * dtype.itemsize)


def activations(step: Step, sizes: Sizes) -> tuple[Activation, ...]:
    """Large tensors inside a launch of these sizes."""
    B, T, R = sizes.batch_size, sizes.rows, sizes.batch_size * (sizes.draft_len + 1)
    found = [Activation.of("logits", torch.float32, R, step.vocab_size)] if step.draws else []
    found += [Activation.of(name, step.like.dtype, T, width) for name, width in step.row_widths.items()]
    if step.draft_vocab_size:
        found.append(Activation.of("logits of drafts", torch.float32, B * step.draft_rows, step.draft_vocab_size))
    return tuple(found)


def silu_bytes(step: Step, rows: int) -> int:
    """Bytes of fp32 tensors that an MLP's silu has at the same time where no compiler fuses it: three of its width."""
    return 3 * rows * step.row_widths.get(GATE_UP, 0) // 2 * 4


def table_bytes(step: Step) -> int:
    """Bytes of the buffers that belong to no weight. Each buffer counts once."""
    weights = {
        id(tensor) for part in step.modules() if isinstance(part, Linear) for tensor in part.quantization_tensors
    }
    return sum(tensor.nbytes for tensor in step.buffers() if id(tensor) not in weights)
