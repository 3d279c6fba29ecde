"""The config.json of Medusa heads, in vLLM's layout and in that of FasterDecoding, which published the heads.

vLLM's layout names every field; a field at its default may be left out. FasterDecoding's layout has `medusa_num_heads`
and `medusa_num_layers`, no model_type, and none of the target's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.checkpoint.folder import CheckpointConfig, head_reader
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig

MEDUSA = "medusa"


@dataclass(frozen=True)
class MedusaConfig:
    """The config of a set of Medusa heads.

    num_layers: residual blocks of each head. hidden_size, vocab_size: None = the target's. draft_vocab_size: None = all
    of the target's ids. fc_bias: whether the blocks have biases, None = the tensors decide. shared_head: all heads
    share one lm_head.
    """

    num_heads: int
    num_layers: int
    hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    fc_bias: bool | None
    shared_head: bool
    logit_scale: float

    @classmethod
    def of(cls, config: CheckpointConfig) -> MedusaConfig:
        """Read the config. UnsupportedError for checkpoints of another kind, CheckpointError for invalid fields."""
        read = head_reader(config, MEDUSA, "set of Medusa heads")
        heads, layers = (
            theirs if read.get(theirs) is not None else ours
            for theirs, ours in (("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers"))
        )
        return cls(
            num_heads=read.positive_int(heads, 5),
            num_layers=read.positive_int(layers, 1),
            hidden_size=read.optional_positive_int("hidden_size"),
            vocab_size=read.optional_positive_int("vocab_size"),
            draft_vocab_size=read.optional_positive_int("truncated_vocab_size"),
            fc_bias=None if read.get("medusa_fc_bias") is None else read.boolean("medusa_fc_bias", False),
            shared_head=read.boolean("original_lm_head", False),
            logit_scale=read.number("logit_scale", 1.0, minimum=0.0),
        )


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether config.json declares a set of Medusa heads."""
    return checkpoint.model_type == MEDUSA or (not checkpoint.model_type and "medusa_num_heads" in checkpoint.raw)


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return the facts about the heads that planning needs. Raises as MedusaConfig.of does."""
    head_config = MedusaConfig.of(checkpoint)
    return DraftInfo(
        method=MEDUSA, vocab_size=head_config.vocab_size, n_predict=head_config.num_heads, checkpoint=checkpoint
    )
