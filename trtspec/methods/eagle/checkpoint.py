"""The fields in config.json of an original EAGLE head that a decoder's config.json does not have."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import UnsupportedError
from trtspec.methods.eagle3.checkpoint import is_eagle3, switch

EAGLE = "eagle"


@dataclass(frozen=True)
class EagleHeadConfig:
    """The config of a head of the original EAGLE.

    fc_bias: whether `fc` has a bias, None where config.json does not say. In that case the publishers of the first
    heads built `fc` with a bias.
    """

    fc_bias: bool | None

    @classmethod
    def of(cls, config: ModelConfig) -> EagleHeadConfig:
        """Read the config. Raises UnsupportedError for heads of another kind, CheckpointError for invalid fields."""
        if is_eagle3(config.architecture):
            raise UnsupportedError(
                f"draft model {config.path}: architecture {config.architecture!r} is an EAGLE3 head, method='eagle' "
                "runs those of the original EAGLE; use method='eagle3'"
            )
        for name, only in (("truncated_vocab_size", config.vocab_size), ("logit_scale", 1)):
            if config.raw.get(name) not in (None, only):
                raise UnsupportedError(
                    f"draft model {config.path}: {name} = {config.raw[name]!r} is not built; only {only} is"
                )
        for name in ("eagle_fc_bias", "bias"):  # vLLM's name, and the original's
            if config.raw.get(name) is not None:
                return cls(switch(config, config.raw, name))
        return cls(None)


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether the architecture names an original EAGLE head. Most public heads name a plain decoder instead."""
    name = architecture_of(checkpoint)
    return name.startswith("Eagle") and not is_eagle3(name)


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return the facts about the head that planning needs. Raises CheckpointError for invalid fields."""
    model = ModelConfig.of(checkpoint, "draft")
    return DraftInfo(method=EAGLE, vocab_size=model.vocab_size, max_model_len=model.max_seq_len, checkpoint=model)
