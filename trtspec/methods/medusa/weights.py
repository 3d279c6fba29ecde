"""Medusa checkpoints: strict loading of the two public layouts.

vLLM's layout:

- `blocks.{head}.layers.{layer}.weight` [H, H] and `.bias` [H]
- `lm_heads.{head}.weight` [Vd, H]; with `token_map` it may still have a row for each of the target's ids
- `token_map` [Vd], where the heads know fewer ids than the target: the target's id of each draft id

With `original_lm_head`, all heads share one lm_head, named `lm_head.weight` or `lm_heads.0.weight`. If there is
neither, they use the target's.

FasterDecoding's layout: `{head}.{layer}.linear.weight` and `.bias`, `{head}.{layers}.weight` for the lm_head, where
{layers} is the number of blocks. Names in both layouts may begin with `medusa_heads.` or `medusa_head.`
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from torch import Tensor

from trtspec.errors import WeightsError
from trtspec.methods.head_weights import HeadSource, HeadWeights
from trtspec.methods.medusa.checkpoint import MedusaConfig
from trtspec.methods.medusa.head import MedusaHead, MedusaSpec
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot


class MedusaWeights(HeadWeights[MedusaSpec]):
    """The layout of Medusa heads; both public layouts are read as vLLM's.

    Tensors of all heads are checked, and those of the kept heads are held. Without weights, there is one lm_head for
    each head, or a single one where config.json says so. There are biases only if config.json says so.
    """

    prefix = "medusa_heads."
    tables = ("token_map",)

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        self.head_config = MedusaConfig.of(source.checkpoint)

    def spec(self, found: Mapping[str, Tensor] | None) -> MedusaSpec:
        head_config, H, V = self.head_config, self.target.spec.hidden_size, self.target.spec.vocab_size
        self.check_made_for(
            ("hidden_size", head_config.hidden_size or H, H), ("vocab_size", head_config.vocab_size or V, V)
        )
        size, bias = head_config.draft_vocab_size or V, head_config.fc_bias
        if size > V:
            raise WeightsError(
                f"draft model {self.source.checkpoint.path}: truncated_vocab_size is {size}, more than the target's "
                f"{V} ids; use the heads trained for this target"
            )
        if found is not None and size != V:
            there = tuple(found["token_map"].shape) if "token_map" in found else "missing"
            if there != (size,):
                raise WeightsError(
                    f"{self.where}: token_map is {there}, expected ({size},): a draft vocabulary of {size} ids for a "
                    f"target's {V} needs it"
                )
        if bias is None:
            bias = any(name.endswith(".bias") for name in found or ())
        own_head = found is None or "lm_heads.0.weight" in found or size != V
        num_lm_heads = head_config.num_heads if not head_config.shared_head else int(own_head)
        return MedusaSpec(
            H, V, size, head_config.num_heads, head_config.num_layers, num_lm_heads, bias, head_config.logit_scale
        )

    def kept(self, whole: MedusaSpec) -> MedusaSpec:
        number = self.source.num_stages
        return dataclasses.replace(whole, num_heads=number, num_lm_heads=min(whole.num_lm_heads, number))

    @staticmethod
    def slots(spec: MedusaSpec) -> dict[str, Slot]:
        H, slots = spec.hidden_size, {}
        for head in range(spec.num_heads):
            for layer in range(spec.num_layers):
                theirs, ours = f"blocks.{head}.layers.{layer}", f"blocks.{head}.{layer}"
                slots[f"{theirs}.weight"] = Slot(f"{ours}.weight", 0, (H, H))
                if spec.bias:
                    slots[f"{theirs}.bias"] = Slot(f"{ours}.bias", 0, (H,))
        for head in range(spec.num_lm_heads):
            slots[f"lm_heads.{head}.weight"] = Slot(f"heads.{head}.weight", 0, (spec.draft_vocab_size, H))
        return slots

    def module(self, spec: MedusaSpec) -> MedusaHead:
        return MedusaHead(spec)

    def public(self, name: str) -> str:
        name = super().public(name).removeprefix("medusa_head.")
        if self.head_config.shared_head and name == "lm_head.weight":
            return "lm_heads.0.weight"
        if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
        if found := re.fullmatch(rf"(\d+)\.{self.head_config.num_layers}\.weight", name):
            return f"lm_heads.{found[1]}.weight"
        return name

    def held(self, spec: MedusaSpec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor; None for the token_map of a draft vocabulary with fewer ids than the target's.

        With such a vocabulary, an lm_head that has a row for each of the target's ids is cut to the rows of the draft
        ids.
        """
        size = spec.draft_vocab_size
        if size == spec.vocab_size:
            return tensor
        if name == "token_map":
            return None
        if name.startswith("lm_heads.") and tensor.shape[:1] == (spec.vocab_size,):
            return tensor[:size] if ids is None else tensor[ids]
        return tensor

    def target_ids(self, spec: MedusaSpec, tables: Mapping[str, Tensor]) -> Tensor | None:
        if "token_map" not in tables or not self.source.reads_weights:
            return None
        token_map = tables["token_map"]
        ids = token_map.long()
        known = ids.tolist()
        outside = min(known) < 0 or max(known) >= spec.vocab_size
        if token_map.is_floating_point() or outside or len({*known}) < len(known):
            raise WeightsError(
                f"{self.where}: token_map must hold different ids of the target, integers in "
                f"0..{spec.vocab_size - 1}; it must come from the same training run as the heads"
            )
        return ids
