"""Run a step module as it is, op by op: the reference backend, and the one to debug with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.workers.step import DecodeStep


class EagerExecutable:
    """A `DecodeStep` and its KV layers."""

    def __init__(self, step: DecodeStep, kv: Sequence[KVLayer]) -> None:
        self.step = step
        self.kv = kv

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """One launch; see core.Executable."""
        spec = inputs.spec
        return StepOutputs(self.step(inputs.input_ids, inputs.attn, spec.gather_ids, spec.sampling, self.kv))
