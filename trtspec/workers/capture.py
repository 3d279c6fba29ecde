"""A target that shows its hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.models.decoder import Decoder
from trtspec.workers.base import draw
from trtspec.workers.step import DecodeStep


class CaptureStep(DecodeStep):
    """As DecodeStep, and StepOutputs.hidden_states holds of all T rows the residual streams after `capture_layers`
    ("after layer i", -1 = after the last norm) and, last, the hidden states after the last norm."""

    outputs = ("tokens", "hidden_states")

    def __init__(self, decoder: Decoder, capture_layers: Sequence[int], functional: bool = False) -> None:
        super().__init__(decoder, functional)
        self.capture_layers = tuple(capture_layers)

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """See DecodeStep."""
        attend = self.attend(inputs.attn, kv, self.decoder.spec.windows)
        positions = inputs.attn.positions(inputs.input_ids.shape[0])
        hidden, captured = self.decoder.capture(inputs.input_ids, positions, attend, self.capture_layers)
        logits = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        return StepOutputs(draw(logits, inputs.spec.sampling), hidden_states=torch.cat((captured, hidden), dim=-1))

    @property
    def num_captured(self) -> int:
        """See DecodeStep; the last normed states are one of them."""
        return len(self.capture_layers) + 1
