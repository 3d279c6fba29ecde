"""Training of Medusa heads (methods.medusa.head): Cai et al., arXiv 2401.10774.

The paper's loss for a frozen target (section 2.2.1, Medusa-1) is cross-entropy of head k with the token that it
guesses, weighted by 0.8^k. Here the label is the target's own output there (section 2.3.2, self-distillation): half its
arg-max, half its distribution. Heads start as the target's lm_head, because blocks of zeros are the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.head import DraftHead
from trtspec.methods.medusa.checkpoint import MEDUSA
from trtspec.methods.medusa.head import MedusaHead, MedusaSpec
from trtspec.methods.medusa.weights import MedusaWeights
from trtspec.models.decoder import Decoder
from trtspec.models.weights import tensors_of
from trtspec.train.data import Tokens
from trtspec.train.head import HeadOptions, attached, dtype_name, plain_head, setting, write_head


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """Options for training Medusa heads. unroll: number of heads. num_layers: residual blocks of each."""

    method: ClassVar[str] = MEDUSA

    num_layers: int = setting(1, "residual blocks of each head")
    unroll: int = setting(4, "heads, each of which drafts one token")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("num_layers")

    @torch.no_grad()
    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> MedusaHead:
        """Return untrained heads, whose blocks are zeros and whose lm_heads are copies of the target's."""
        H, V = target.spec.hidden_size, target.spec.vocab_size
        head = MedusaHead(MedusaSpec(H, V, V, self.unroll, self.num_layers, num_lm_heads=self.unroll))
        for parameter in head.blocks.parameters():
            parameter.zero_()
        for lm_head in head.heads:
            cast(Tensor, lm_head.weight).copy_(plain_head(target))
        return attached(head, target)

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the heads to `out` in vLLM's layout, in bf16."""
        assert isinstance(head, MedusaHead)
        facts = {
            "architectures": ["MedusaModel"],
            "model_type": MEDUSA,
            "hidden_size": head.spec.hidden_size,
            "vocab_size": head.spec.vocab_size,
            "num_heads": head.spec.num_heads,
            "num_hidden_layers": head.spec.num_layers,
            "medusa_fc_bias": False,
            "torch_dtype": dtype_name(torch.bfloat16),
        }
        write_head(self.out, tensors_of(head, MedusaWeights.slots(head.spec)), facts, torch.bfloat16)
