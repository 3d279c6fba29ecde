"""DFlash checkpoints: strict loading of z-lab's layout and of that of speculators, which have the same tensor names.

The layout is `fc.weight` [H, n * H], `hidden_norm.weight`, `norm.weight` [H], and `layers.{i}.*` as in Qwen3. Some
exporters put `model.` before every name. The draft uses the target's embedding and lm_head. Only a draft with a
vocabulary of Vd ids, fewer than the target's, has its own `lm_head.weight` [Vd, H], `d2t` [Vd] and `t2d` [V], as EAGLE3
does.

Files of speculators may hold a frozen copy of the target's embedding or lm_head, which is ignored. Any other file with
an embedding is refused, as is one with sinks (attention_sink_bias).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtspec.methods.dflash.checkpoint import DFlashConfig
from trtspec.methods.dflash.head import DFlashHead, DFlashSpec
from trtspec.methods.draft_vocabulary import TABLES, ids_of_tables
from trtspec.methods.head_weights import HeadSource, HeadWeights, module_of
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import ARCHITECTURES, dense_spec


class DFlashWeights(HeadWeights[DFlashSpec]):
    """The weights of the draft's own layers; which ones there are does not depend on the tensors in the files."""

    prefix = "model."
    tables = TABLES

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        config, depth = source.decoder, target.spec.num_layers
        self.head_config = DFlashConfig.of(config)
        self.check_made_for(
            ("hidden_size", config.hidden_size, target.spec.hidden_size),
            ("vocab_size", config.vocab_size, target.spec.vocab_size),
            ("num_target_layers", self.head_config.num_target_layers or depth, depth),
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> DFlashSpec:
        return DFlashSpec(
            decoder=dense_spec(self.source.decoder, ARCHITECTURES["Qwen3ForCausalLM"]),
            num_captured=self.source.num_captured,
            draft_vocab_size=self.head_config.draft_vocab_size,
            own_head=self.head_config.draft_vocab_size != self.source.decoder.vocab_size,
        )

    @staticmethod
    def slots(spec: DFlashSpec) -> dict[str, Slot]:
        H = spec.decoder.hidden_size
        slots = {"fc.weight": Slot("fc.weight", 0, (H, spec.num_captured * H))}
        slots |= {f"{name}.weight": Slot(f"{name}.weight", 0, (H,)) for name in ("hidden_norm", "norm")}
        for layer in range(spec.decoder.num_layers):
            slots |= layer_slots(spec.decoder, f"layers.{layer}.", f"layers.{layer}.", H)
        if spec.own_head:
            slots["lm_head.weight"] = Slot("head.weight", 0, (spec.draft_vocab_size, H))
        return slots

    def module(self, spec: DFlashSpec) -> DFlashHead:
        return DFlashHead(spec, self.first_layer, self.source.max_seq_len)

    def held(self, spec: DFlashSpec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor, or None for tables and for the copies that speculators writes."""
        copied = name == "embed_tokens.weight" or (module_of(name) == "lm_head" and not spec.own_head)
        return None if (copied and self.head_config.of_speculators) or name in self.tables else tensor

    def target_ids(self, spec: DFlashSpec, tables: Mapping[str, Tensor]) -> Tensor | None:
        """Return the target id of each draft id, from d2t; t2d must agree with it."""
        size, vocab = spec.draft_vocab_size, spec.decoder.vocab_size
        return ids_of_tables(tables, size, vocab, self.where, self.source.reads_weights)
