"""DFlash checkpoints: strict loading of z-lab's layout.

The layout: `fc.weight` [H, n * H], `hidden_norm.weight`, `norm.weight` [H], `layers.{i}.*` as in Qwen3; some exporters
put `model.` before everything. There is no embedding and no lm_head: the target's serve. Files that bring their own, a
vocabulary of fewer ids (d2t) or sinks (attention_sink_bias) are refused as having unexpected tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtspec.methods.dflash.checkpoint import DFlashFacts
from trtspec.methods.dflash.head import DFlashHead, DFlashSpec
from trtspec.methods.head_weights import HeadSource, HeadWeights
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import ARCHITECTURES, dense_spec


class DFlashWeights(HeadWeights[DFlashSpec]):
    """The draft's own layers; nothing in them depends on the tensors that there are."""

    prefix = "model."

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        config, facts, depth = source.decoder, DFlashFacts.of(source.decoder), target.spec.num_layers
        self.check_made_for(
            ("hidden_size", config.hidden_size, target.spec.hidden_size),
            ("vocab_size", config.vocab_size, target.spec.vocab_size),
            ("num_target_layers", facts.num_target_layers or depth, depth),
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> DFlashSpec:
        return DFlashSpec(dense_spec(self.source.decoder, ARCHITECTURES["Qwen3ForCausalLM"]), self.source.num_captured)

    @staticmethod
    def slots(spec: DFlashSpec) -> dict[str, Slot]:
        H = spec.decoder.hidden_size
        slots = {"fc.weight": Slot("fc.weight", 0, (H, spec.num_captured * H))}
        slots |= {f"{name}.weight": Slot(f"{name}.weight", 0, (H,)) for name in ("hidden_norm", "norm")}
        for layer in range(spec.decoder.num_layers):
            slots |= layer_slots(spec.decoder, f"layers.{layer}.", f"layers.{layer}.", H)
        return slots

    def module(self, spec: DFlashSpec) -> DFlashHead:
        return DFlashHead(spec, self.first_layer, self.source.max_seq_len)
