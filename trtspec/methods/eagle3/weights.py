"""EAGLE3 checkpoints: strict loading of the public layout, and export in it.

The layout:

- `midlayer.*`; some exporters write `layers.0.*`
- `fc.weight` [H, n * Ht], `norm.weight`, `lm_head.weight` [Vd, H]
- `d2t` [Vd] (target id = draft id + d2t), `t2d` [V] bool
- `embed_tokens.weight`, only where it differs from the target's
- in some heads a norm before `fc`: `input_norm.weight` [n * Ht] or `fc_norm.{0, 1, ...}.weight` [Ht]
- in P-EAGLE also `layers.{1, 2, ...}.*` as in Llama, and `mask_hidden`, n * Ht elements in any shape

Some exporters put `model.` before every name. The target provides what a checkpoint leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from trtspec.errors import WeightsError
from trtspec.methods.draft_vocabulary import TABLES, ids_of_tables
from trtspec.methods.eagle3.checkpoint import Eagle3HeadConfig
from trtspec.methods.eagle3.head import Eagle3Head, Eagle3Spec
from trtspec.methods.head_weights import HeadSource, HeadWeights, module_of
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import dense_spec
from trtspec.models.weights import tensors_of

_MASK = "mask_hidden"


class Eagle3Weights(HeadWeights[Eagle3Spec]):
    """The layout of EAGLE3 and P-EAGLE heads.

    Without weights, a head counts as having an lm_head of its own, as public heads do. It counts as having no norms of
    queries and keys, and an embedding only if it needs one.
    """

    prefix = "model."
    tables = TABLES

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        config = source.decoder
        self.head_config = Eagle3HeadConfig.of(config, source.parallel)
        self.check_made_for(
            ("target_hidden_size (or hidden_size)", self.head_config.target_hidden_size, target.spec.hidden_size),
            ("vocab_size", config.vocab_size, target.spec.vocab_size),
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> Eagle3Spec:
        config, head_config, names = self.source.decoder, self.head_config, found or {}
        if "fc.weight" in names:
            self._check_fused(tuple(names["fc.weight"].shape))
        own_width = config.hidden_size != self.target.spec.hidden_size
        own_vocabulary = head_config.draft_vocab_size != config.vocab_size
        return Eagle3Spec(
            layer=dataclasses.replace(
                dense_spec(config), qk_norm=any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names)
            ),
            target_hidden_size=head_config.target_hidden_size,
            num_captured=self.source.num_captured,
            draft_vocab_size=head_config.draft_vocab_size,
            norm_before_residual=head_config.norm_before_residual,
            norm_before_fc=head_config.norm_before_fc,
            fc_norm=head_config.fc_norm,
            norm_output=head_config.norm_output,
            own_embedding="embed_tokens.weight" in names or own_width,
            own_head=found is None or "lm_head" in map(module_of, names) or own_width or own_vocabulary,
            parallel=self.source.parallel,
        )

    @staticmethod
    def slots(spec: Eagle3Spec) -> dict[str, Slot]:
        layer, H = spec.layer, spec.layer.hidden_size
        slots = layer_slots(layer, "midlayer.", "midlayer.", 2 * H)
        slots["midlayer.hidden_norm.weight"] = Slot("midlayer.hidden_norm.weight", 0, (H,))
        slots["fc.weight"] = Slot("fc.weight", 0, (H, spec.num_captured * spec.target_hidden_size))
        slots["norm.weight"] = Slot("norm.weight", 0, (H,))
        if spec.norm_before_fc:
            slots["input_norm.weight"] = Slot("input_norm.weight", 0, (spec.num_captured * spec.target_hidden_size,))
        for i in range(spec.num_captured if spec.fc_norm else 0):
            slots[f"fc_norm.{i}.weight"] = Slot(f"fc_norm.{i}.weight", 0, (spec.target_hidden_size,))
        for i in range(1, layer.num_layers):
            slots |= layer_slots(layer, f"layers.{i}.", f"layers.{i - 1}.", H)
        if spec.parallel:
            slots[_MASK] = Slot(_MASK, 0, (spec.num_captured * spec.target_hidden_size,))
        if spec.own_embedding:
            slots["embed_tokens.weight"] = Slot("embedding.weight", 0, (layer.vocab_size, H))
        if spec.own_head:
            slots["lm_head.weight"] = Slot("head.weight", 0, (spec.draft_vocab_size, H))
        return slots

    def module(self, spec: Eagle3Spec) -> Eagle3Head:
        return Eagle3Head(spec, self.first_layer, self.source.max_seq_len)

    def public(self, name: str) -> str:
        name = super().public(name)
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name

    def held(self, spec: Eagle3Spec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor, the mask as a vector; None for d2t and t2d."""
        if name in self.tables:
            return None
        return tensor.flatten() if name == _MASK else tensor

    def target_ids(self, spec: Eagle3Spec, tables: Mapping[str, Tensor]) -> Tensor | None:
        """Return the target ids from d2t, with which t2d must agree; the shapes of both are checked first."""
        size, vocab = spec.draft_vocab_size, spec.layer.vocab_size
        return ids_of_tables(tables, size, vocab, self.where, self.source.reads_weights)

    def _check_fused(self, fc: tuple[int, ...]) -> None:
        """Raise WeightsError if fc.weight fuses another number of states than are captured.

        This is apart from the check of other shapes because its remedy is another: the number of captured layers is
        wrong.
        """
        size, num_captured = self.head_config.target_hidden_size, self.source.num_captured
        if len(fc) != 2 or fc[1] % size or fc[1] == num_captured * size:
            return
        wanted = fc[1] // size
        raise WeightsError(
            f"{self.where}: fc.weight is {fc}, expected ({self.source.decoder.hidden_size}, {num_captured * size}): it "
            f"fuses {wanted} hidden states of {size}, but {num_captured} hidden states are captured; set "
            f"capture_layers to the {wanted} layers it was trained on"
        )


def eagle3_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Return the head's tensors in the public layout, as contiguous copies."""
    tensors = tensors_of(head, Eagle3Weights.slots(head.spec))
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    tensors["t2d"] = head.draft_ids >= 0
    return tensors
