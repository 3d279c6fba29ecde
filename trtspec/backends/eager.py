"""Run a step module op by op: the reference backend, for debugging and for systems that cannot compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.methods.step import Step
from trtspec.ops import kernel_threads


class EagerExecutable:
    """A step module with its KV layers, as a protocols.Executable."""

    def __init__(self, step: Step, kv: Sequence[KVLayer]) -> None:
        self.step = step
        self.kv = kv

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run one step; protocols.Executable has the contract."""
        with kernel_threads():
            return self.step(inputs, self.kv)  # type: ignore[no-any-return]
