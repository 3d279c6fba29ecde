"""Number of kernels that a step launches on a GPU, counted on torch's meta device: no kernel runs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed here: pip install 'trtspec[triton]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from triton.runtime.jit import JITFunction
from trtspec_plugins import triton as kernels

from tests.checkpoints import make_checkpoint
from trtspec.backends.export import GraphStep, example_batch, moved
from trtspec.backends.graph_io import graph_inputs, input_names
from trtspec.backends.table import BACKENDS
from trtspec.build.context import plan_context
from trtspec.build.steps import build_step
from trtspec.config.engine import EngineConfig
from trtspec.models.attention import as_ops
from trtspec.ops import linear

META = torch.device("meta")
OF_A_LAYER = 11
"""Two norms, four linears, rotated heads, attention of short sequences, a gated unit, two sums."""
OUTSIDE = 36
"""Metadata, the embedding, angles, the last norm, logits, filters, a draw."""


class Launches(TorchDispatchMode):
    """Counts launches: one for each of torch's operations that computes, and those of our launchers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = op._schema.name.removeprefix("trtspec::")
        if name in kernels.OPS:
            getattr(importlib.import_module(f"{kernels.__name__}.{kernels.OPS[name]}"), name)(*args, **(kwargs or {}))
        elif name == "packed_swiglu":  # it calls two ops
            with self:
                return linear._swiglu(*args)
        elif not op.is_view and "empty" not in name:
            self.found.append(name)
        return op(*args, **(kwargs or {}))


def launches(folder: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches of a step without drafts of a Llama with that many layers."""
    target = make_checkpoint(folder, "llama", num_hidden_layers=layers)
    step = build_step(plan_context(target, None, EngineConfig(backend="cuda"), BACKENDS["cuda"]))
    as_ops(step)
    module = GraphStep(step, 0, 1)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    there = {name: moved(weight, META) for name, weight in weights.items()}
    counted = Launches()

    def record(function: JITFunction, *args: Any, **kwargs: Any) -> None:
        counted.found.append(function.__name__)

    monkeypatch.setattr(JITFunction, "run", record)
    inputs = moved(example_batch(0, 16, uniform=True), META)
    kv = [tuple(torch.empty(999, 16, h, d, device="meta") for _ in "kv") for h, d, _ in step.kv_layers]
    with torch.no_grad(), counted:
        torch.func.functional_call(module, there, (graph_inputs(inputs, input_names(step, uniform=True)), kv))
    return counted.found


def test_launches_of_a_layer_and_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = (launches(tmp_path / str(layers), layers, monkeypatch) for layers in (2, 3))
    assert len(three) - len(two) == OF_A_LAYER, three
    assert len(two) - 2 * OF_A_LAYER <= OUTSIDE, two
    assert "few_rows_kernel" in two
