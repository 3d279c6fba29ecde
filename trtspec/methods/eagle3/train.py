"""Training of EAGLE3 heads (methods.eagle3.head): new heads for a given target, and export in the public layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError
from trtspec.methods.eagle3.checkpoint import check_family
from trtspec.methods.eagle3.head import Eagle3Head, Eagle3Spec
from trtspec.methods.eagle3.weights import eagle3_tensors
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.head import (
    CapturingOptions,
    attached,
    initialise_head,
    layer_config,
    one_layer,
    plain_head,
    setting,
    write_head,
)
from trtspec.train.training_batches import frequent_tokens


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(CapturingOptions):
    """Options for training an EAGLE3 head.

    draft_vocab_size: number of ids that the head can draft, None = all. intermediate_size: width of its MLP, None = the
    target's.
    """

    method: ClassVar[str] = "eagle3"

    draft_vocab_size: int | None = setting(None, "token ids the head can say, the most frequent ones (default: all)")
    intermediate_size: int | None = setting(None, "width of the head's MLP (default: the target's)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("draft_vocab_size", "intermediate_size")

    def check_target(self, config: ModelConfig) -> None:
        """Raise ConfigError if draft_vocab_size exceeds the target's vocabulary, or no engine would take the head."""
        check_family(config.model_type)
        if (self.draft_vocab_size or 0) > config.vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size}: the target's vocabulary has {config.vocab_size} ids"
            )

    @property
    def one_head(self) -> bool:
        """Return True: pass j reads the output of pass j - 1."""
        return True

    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> Eagle3Head:
        """Return an untrained head whose draft vocabulary is the most frequent ids in `tokens`."""
        vocab_size = target.spec.vocab_size
        ids = frequent_tokens(tokens, vocab_size, self.draft_vocab_size or vocab_size)
        return new_head(target, capture, ids, self.intermediate_size)

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the head to `out` in the public layout."""
        assert isinstance(head, Eagle3Head)
        export_eagle3(head, config, capture, self.out)


@torch.no_grad()
def new_head(
    target: Decoder, capture_layers: Sequence[int], target_ids: Tensor, intermediate_size: int | None = None
) -> Eagle3Head:
    """Return an untrained head of the target's shape, in fp32, seeded by torch's generator.

    target_ids: [Vd], its draft vocabulary. Its lm_head and norm start as the target's, the lm_head with the rows of the
    draft ids. The embedding is the target's and stays so.
    """
    head = Eagle3Head(
        Eagle3Spec(
            layer=one_layer(target.spec, intermediate_size=intermediate_size or target.spec.intermediate_size),
            target_hidden_size=target.spec.hidden_size,
            num_captured=len(capture_layers),
            draft_vocab_size=len(target_ids),
        )
    )
    initialise_head(head)
    head.set_vocabulary(target_ids)
    cast(Tensor, head.head.weight).copy_(plain_head(target)[target_ids])
    head.norm.weight.copy_(target.norm.weight.float())
    return attached(head, target)


def export_eagle3(
    head: Eagle3Head, target: ModelConfig, capture: Sequence[int], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config and weights (as `dtype`) to `folder` in the public layout."""
    write_head(folder, eagle3_tensors(head), eagle3_config(head, target, capture, dtype), dtype)


def eagle3_config(head: Eagle3Head, target: ModelConfig, capture: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json in the public layout. ConfigError if the head reads the stream after the last norm."""
    if any(i < 0 for i in capture):
        raise ConfigError(f"capture_layers={tuple(capture)}: the public layout cannot name the stream after the norm")
    ids = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in capture]}  # there, an id is the layer entered
    nested = {"use_aux_hidden_state": True, **({} if 0 in capture else ids)}  # where 1 means something else
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(head.spec.layer, target, dtype),
        "draft_vocab_size": head.spec.draft_vocab_size,
        "target_hidden_size": head.spec.target_hidden_size,
        "norm_before_residual": head.spec.norm_before_residual,
        "eagle_config": nested,
        **(ids if 0 in capture else {}),
    }
