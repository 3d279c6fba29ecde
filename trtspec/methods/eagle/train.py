"""Training of EAGLE heads (methods.eagle.head): Li et al., arXiv 2401.15077, section 4.2.

The loss is the paper's: smooth L1 between the head's output and the feature that it guesses, plus a tenth of
cross-entropy with the target's distribution. The feature is the target's last hidden state one position further on.

The paper's head reads only the target's features (teacher forcing), with noise on them against its own errors. Here
unroll=1 is the same without the noise. With a larger unroll, later passes read the head's own features, as in
inference. Zhang et al., "Learning harmonized representations for speculative sampling" (HASS, arXiv 2408.15766), train
EAGLE so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.eagle.head import EagleHead, EagleSpec
from trtspec.methods.eagle.weights import EagleWeights
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.models.weights import tensors_of
from trtspec.train.data import Tokens
from trtspec.train.head import HeadOptions, attached, initialise_head, layer_config, one_layer, setting, write_head
from trtspec.train.unrolled import Objective


@dataclass(frozen=True, kw_only=True)
class EagleOptions(HeadOptions):
    """Options for training an EAGLE head. intermediate_size: width of the layer's MLP, None = the target's."""

    method: ClassVar[str] = "eagle"
    objective: ClassVar[Objective] = Objective(tokens=0.1, hard=0.0, features=1.0)

    intermediate_size: int | None = setting(None, "width of the head's MLP (default: the target's)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("intermediate_size")

    @property
    def one_head(self) -> bool:
        """Return True: pass j reads the output of pass j - 1."""
        return True

    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> EagleHead:
        """Return an untrained head without biases, because vLLM reads no bias of fc."""
        size = self.intermediate_size or target.spec.intermediate_size
        head = EagleHead(EagleSpec(one_layer(target.spec, intermediate_size=size)))
        initialise_head(head)
        return attached(head, target)

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the head to `out` in bf16. vLLM tells such a folder from a draft model by method="eagle"."""
        assert isinstance(head, EagleHead)
        facts = {
            "architectures": ["LlamaForCausalLM"],
            **layer_config(head.spec.decoder, config, torch.bfloat16),
            "eagle_fc_bias": False,
        }
        write_head(self.out, tensors_of(head, EagleWeights.slots(head.spec)), facts, torch.bfloat16)
