"""Training of MLP speculators (methods.mlp_speculator.head): Wertheimer et al., arXiv 2404.19124; IBM's fms-extras.

The paper's first phase learns from text, its second from the target's own continuations. Here both happen at once, as
for all kinds of heads. The loss is cross-entropy of stage i with the token that it guesses; here the label is the
target's own output. As in fms-extras, matrices and embeddings start normal, with 1/sqrt(inner size). The first proj
starts with 1/sqrt(hidden size). The state that the stages read is normalised (scale_input), as in the public
speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError
from trtspec.methods.head import DraftHead
from trtspec.methods.mlp_speculator.checkpoint import MLP_SPECULATOR
from trtspec.methods.mlp_speculator.head import MLPSpeculatorHead, MLPSpeculatorSpec
from trtspec.methods.mlp_speculator.weights import MLPSpeculatorWeights
from trtspec.models.decoder import Decoder
from trtspec.models.weights import tensors_of
from trtspec.train.data import Tokens
from trtspec.train.head import HeadOptions, attached, dtype_name, initialise_head, setting, write_head


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorOptions(HeadOptions):
    """Options for training an MLP speculator.

    unroll: number of stages. inner_size: width of their state, None = the target's hidden size. tie_weights: all stages
    share one embedding, norm and lm_head, and all but the first share one matrix.
    """

    method: ClassVar[str] = MLP_SPECULATOR

    inner_size: int | None = setting(None, "width of the state (default: the target's hidden size)")
    tie_weights: bool = setting(False, "stages share what they can")
    unroll: int = setting(4, "stages, each of which drafts one token")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("inner_size")
        if self.tie_weights and self.unroll == 1:
            raise ConfigError("tie_weights=True with unroll=1: one stage shares nothing; leave it out")

    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> MLPSpeculatorHead:
        """Return an untrained speculator with `unroll` stages and scale_input."""
        H, V, n = target.spec.hidden_size, target.spec.vocab_size, self.unroll
        spec = MLPSpeculatorSpec(H, self.inner_size or H, V, n, n, tied=self.tie_weights, scale_input=True)
        head = MLPSpeculatorHead(spec)
        initialise_head(head)
        return attached(head, target)

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the speculator to `out` in bf16; weights that stages share are written once."""
        assert isinstance(head, MLPSpeculatorHead)
        spec = head.spec
        facts = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": MLP_SPECULATOR,
            "vocab_size": spec.vocab_size,
            "emb_dim": spec.hidden_size,
            "inner_dim": spec.inner_size,
            "n_predict": spec.n_predict,
            "top_k_tokens_per_head": [1] * spec.n_predict,
            "n_candidates": 1,
            "tie_weights": spec.tied,
            "scale_input": spec.scale_input,
            "torch_dtype": dtype_name(torch.bfloat16),
        }
        tensors = tensors_of(head, MLPSpeculatorWeights.slots(spec))
        tensors = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
        write_head(self.out, tensors, facts, torch.bfloat16)
