"""DSpark checkpoints: strict loading of both layouts, whose tensors have the same names.

The tensors are `fc.weight` [H, n * H], `hidden_norm.weight`, `norm.weight` [H], `layers.{i}.*` as in Qwen3, and

    markov_head.markov_w1.weight [V, R], markov_w2.weight [Vd, R]
    markov_head.gate_proj.weight [R, H + R], .bias [R]              gated
    markov_head.joint_proj.weight [3 R, 2 R + H], .bias [3 R]       rnn
    confidence_head.proj.weight [1, H (+ R)], .bias [1]
    d2t [Vd], t2d [V], lm_head.weight [Vd, H]                       if the draft has fewer ids than the target

Both trainers also write an embed_tokens.weight, and an lm_head.weight over all ids. These are frozen copies of the
target's, and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtspec.methods.dflash.weights import DFlashWeights
from trtspec.methods.draft_vocabulary import TABLES, ids_of_tables
from trtspec.methods.dspark.checkpoint import DSparkConfig
from trtspec.methods.dspark.head import DSparkHead, DSparkSpec
from trtspec.methods.head_weights import HeadSource, HeadWeights, module_of
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot
from trtspec.models.specs import ARCHITECTURES, dense_spec


class DSparkWeights(HeadWeights[DSparkSpec]):
    """The weights of a DSpark draft; which ones there are follows from config.json alone."""

    prefix = "model."
    tables = TABLES

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        config, depth = source.decoder, target.spec.num_layers
        self.head_config = DSparkConfig.of(config)
        self.check_made_for(
            ("hidden_size", config.hidden_size, target.spec.hidden_size),
            ("vocab_size", config.vocab_size, target.spec.vocab_size),
            ("num_target_layers", self.head_config.num_target_layers or depth, depth),
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> DSparkSpec:
        head_config = self.head_config
        return DSparkSpec(
            decoder=dense_spec(self.source.decoder, ARCHITECTURES["Qwen3ForCausalLM"]),
            num_captured=self.source.num_captured,
            draft_vocab_size=head_config.draft_vocab_size,
            from_anchor=head_config.from_anchor,
            rank=head_config.markov_rank,
            markov=head_config.markov,
            confidence=head_config.confidence,
            confidence_reads_markov=head_config.confidence_reads_markov,
            own_head=head_config.draft_vocab_size != self.source.decoder.vocab_size,
        )

    @staticmethod
    def slots(spec: DSparkSpec) -> dict[str, Slot]:
        H, V, R, Vd = spec.decoder.hidden_size, spec.decoder.vocab_size, spec.rank, spec.draft_vocab_size
        slots = DFlashWeights.slots(spec)
        if R:
            slots["markov_head.markov_w1.weight"] = Slot("markov.embedding.weight", 0, (V, R))
            slots["markov_head.markov_w2.weight"] = Slot("markov.bias.weight", 0, (Vd, R))
        linears = {
            "gated": ("markov_head.gate_proj", "markov.gate", (R, H + R)),
            "rnn": ("markov_head.joint_proj", "markov.joint", (3 * R, 2 * R + H)),
        }
        biased = [linears[spec.markov]] if spec.markov in linears else []
        if spec.confidence:
            biased.append(("confidence_head.proj", "confidence", (1, H + R * spec.confidence_reads_markov)))
        for theirs, ours, shape in biased:
            slots[f"{theirs}.weight"] = Slot(f"{ours}.weight", 0, shape)
            slots[f"{theirs}.bias"] = Slot(f"{ours}.bias", 0, shape[:1])
        return slots

    def module(self, spec: DSparkSpec) -> DSparkHead:
        return DSparkHead(spec, self.first_layer, self.source.max_seq_len)

    def held(self, spec: DSparkSpec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor, or None for tables and for copies of the target's tensors."""
        copied = name == "embed_tokens.weight" or (module_of(name) == "lm_head" and not spec.own_head)
        return None if copied or name in self.tables else tensor

    def target_ids(self, spec: DSparkSpec, tables: Mapping[str, Tensor]) -> Tensor | None:
        """Return the target id of each draft id, from d2t; t2d must agree with it."""
        size, vocab = self.head_config.draft_vocab_size, spec.decoder.vocab_size
        return ids_of_tables(tables, size, vocab, self.where, self.source.reads_weights)
