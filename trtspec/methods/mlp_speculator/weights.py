"""MLP speculator checkpoints: strict loading of the public layout.

The tensors of stages i = 0..n_predict-1:

- `emb.{i}.weight` and `head.{i}.weight` [V, I]
- `proj.{i}.weight` [I, H] (i = 0) or [I, I]
- `ln.{i}.weight` and `ln.{i}.bias` [I]

Either every name begins with `speculator.`, or none does. With tie_weights, all stages share emb, head and ln, and the
stages from 1 on share proj. A shared tensor may be present under any one of its stages' numbers, or under several.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trtspec.errors import WeightsError
from trtspec.methods.head_weights import HeadSource, HeadWeights, Named
from trtspec.methods.mlp_speculator.checkpoint import MLPSpeculatorConfig
from trtspec.methods.mlp_speculator.head import MLPSpeculatorHead, MLPSpeculatorSpec
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot
from trtspec.models.weights import Wanted


class MLPSpeculatorWeights(HeadWeights[MLPSpeculatorSpec]):
    """The layout of MLP speculators.

    Tensors of all stages are checked, and those of the kept stages are held. The public name of a shared tensor has the
    first number that it may have.
    """

    prefix = "speculator."

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        self.head_config, H, V = (
            MLPSpeculatorConfig.of(source.checkpoint),
            target.spec.hidden_size,
            target.spec.vocab_size,
        )
        self.check_made_for(
            ("emb_dim", self.head_config.hidden_size or H, H), ("vocab_size", self.head_config.vocab_size or V, V)
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> MLPSpeculatorSpec:
        head_config, target = self.head_config, self.target.spec
        H, V, n = target.hidden_size, target.vocab_size, head_config.n_predict
        return MLPSpeculatorSpec(
            H, head_config.inner_size or H, V, n, n, head_config.tie_weights, head_config.scale_input
        )

    def kept(self, whole: MLPSpeculatorSpec) -> MLPSpeculatorSpec:
        return dataclasses.replace(whole, num_stages=self.source.num_stages)

    @staticmethod
    def slots(spec: MLPSpeculatorSpec) -> dict[str, Slot]:
        H, I, V = spec.hidden_size, spec.inner_size, spec.vocab_size  # noqa: E741
        slots = {}
        for i in range(spec.num_shared):
            slots[f"emb.{i}.weight"] = Slot(f"embeddings.{i}.weight", 0, (V, I))
            slots[f"head.{i}.weight"] = Slot(f"heads.{i}.weight", 0, (V, I))
            slots[f"ln.{i}.weight"] = Slot(f"norms.{i}.norm.weight", 0, (I,))
            slots[f"ln.{i}.bias"] = Slot(f"norms.{i}.bias", 0, (I,))
        for i in range(spec.num_projs):
            slots[f"proj.{i}.weight"] = Slot(f"projs.{i}.weight", 0, (I, I if i else H))
        return slots

    def module(self, spec: MLPSpeculatorSpec) -> MLPSpeculatorHead:
        return MLPSpeculatorHead(spec)

    def wanted(self, spec: MLPSpeculatorSpec | None = None) -> Wanted:
        """Return a filter on tensor names: all tensors where stages share weights, because copies are compared."""
        return super().wanted(None if self.head_config.tie_weights else spec)

    def tensors(self, found: Named) -> Named:
        found = super().tensors(found)
        return self._shared_once(found) if self.head_config.tie_weights else found

    def held(self, spec: MLPSpeculatorSpec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor; None if its values were read and its stage does not run."""
        return tensor if tensor.is_meta or name in self.slots(spec) else None

    def _shared_once(self, found: Named) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, shared ones once. WeightsError if stages have different values of a shared tensor."""
        first: dict[str, Tensor] = {}
        for name, tensor in found:
            own, parts = name, re.fullmatch(r"(emb|head|ln|proj)\.(\d+)\.(weight|bias)", name)
            if parts and int(parts[2]) < self.head_config.n_predict:
                own = f"{parts[1]}.{min(int(parts[2]), int(parts[1] == 'proj'))}.{parts[3]}"
            other = first.setdefault(own, tensor)
            if other is tensor:
                yield own, tensor
            elif other.shape != tensor.shape or not (tensor.is_meta or torch.equal(other, tensor)):
                raise WeightsError(
                    f"{self.where}: tie_weights is true, but {name} differs from what other stages have in its place; "
                    "correct config.json"
                )
