"""The config.json of a whole decoder that drafts, and the targets that it can draft for."""

from __future__ import annotations

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.methods.mask_token import mask_token_id

DRAFT_MODEL = "draft_model"


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return what planning needs to know of the draft. Raises the errors of ModelConfig.of."""
    model = ModelConfig.of(checkpoint, "draft")
    return DraftInfo(
        method=DRAFT_MODEL,
        vocab_size=model.vocab_size,
        max_model_len=model.max_seq_len,
        mask_token_id=mask_token_id(model) if config.parallel_drafting else None,
        checkpoint=model,
    )


def check(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> None:
    """Raise ConfigError for a vocabulary that is not the target's, unless ids are to be translated and can be."""
    if config.use_heterogeneous_vocab:
        if config.draft_sample_method == "probabilistic":
            raise ConfigError(
                "use_heterogeneous_vocab=True with draft_sample_method='probabilistic'; leave draft_sample_method "
                "unset, or use 'greedy'"
            )
        if config.one_engine or config.parallel_drafting:
            raise ConfigError(
                f"use_heterogeneous_vocab=True with one_engine={config.one_engine}, "
                f"parallel_drafting={config.parallel_drafting}: ids are translated for a draft model next to the "
                "target alone; set one_engine=False and parallel_drafting=False"
            )
    elif draft is not None and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"vocab_size={draft.vocab_size} of the draft model={config.model!r} differs from the target's "
            f"{target.vocab_size}; use a draft with the target's tokenizer, or set use_heterogeneous_vocab=True"
        )
