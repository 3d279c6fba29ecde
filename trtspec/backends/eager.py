"""Run a step module as it is, op by op: the reference backend, to debug with, and where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.methods.step import Step
from trtspec.ops import kernel_threads


class EagerExecutable:
    """A step module and its KV layers."""

    def __init__(self, step: Step, kv: Sequence[KVLayer]) -> None:
        self.step = step
        self.kv = kv

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """One launch; see protocols.Executable."""
        with kernel_threads():
            return self.step(inputs, self.kv)  # type: ignore[no-any-return]
