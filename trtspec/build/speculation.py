"""Combine the user's settings of speculation with the checkpoints of target and draft."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import cast

from trtspec.build.engine_folder import MARK
from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of, read_checkpoint
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.speculation_plan import DraftInfo, SpeculationPlan, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError
from trtspec.hub.folders import checkpoint_folder
from trtspec.methods.planning import plan_speculation, recognise, settle
from trtspec.methods.table import METHODS, Method
from trtspec.models.specs import require_architecture
from trtspec.text import Tokenizer
from trtspec.text.vocabulary import VocabularyMap, map_vocabularies

logger = logging.getLogger(__name__)

_FEW_TOKENS, _SMALL_SHARE = 100, 0.1


def plan_for_target(
    speculative: SpeculativeConfig | None, target: ModelConfig, max_seq_len: int, config: EngineConfig
) -> tuple[CheckpointConfig | None, SpeculationPlan | None]:
    """Return the draft checkpoint, if the mode runs one, and the complete plan of the speculation."""
    if speculative is None:
        return None, None
    draft = read_draft(speculative, target)
    spec_plan = plan_speculation(
        speculative,
        TargetInfo(
            model=str(target.path),
            model_type=target.model_type,
            vocab_size=target.vocab_size,
            max_model_len=max_seq_len,
            num_hidden_layers=target.num_layers,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            quantization=config.quantization,
        ),
        draft,
        target.quantization,
    )
    return None if draft is None else draft.checkpoint, spec_plan


def read_draft(speculative: SpeculativeConfig, target: ModelConfig | None = None) -> DraftInfo | None:
    """Return what the draft checkpoint states about itself; None if there is none, or none is named.

    The checkpoint is the one that `model` names or, for layers that come with the target, the target's own. The method
    decides what kind of draft it is; without a method its config.json does.
    """
    row, model = settle(speculative)
    if row is not None and row.checkpoint is None:
        return None
    if model is None:
        if speculative.revision is not None:
            raise ConfigError(f"revision={speculative.revision!r}, and no model is named; set model, or leave it unset")
        if row is None or not row.of_target or target is None:
            return None
        return _read(row, target, speculative, target)
    folder = checkpoint_folder(model, "draft", speculative.revision)
    if row is not None and row.of_target and target is not None and not folder.is_dir():
        raise ConfigError(
            f"model={model!r} with method={row.name!r} is no folder on this machine; pass the folder of MTP layers for "
            f"this target, or leave model unset for those of the target's own checkpoint, {target.path}"
        )
    checkpoint = read_checkpoint(folder, "draft")  # raises with what is wrong with the folder
    found = recognise(checkpoint)
    if row is not None and found is not row and found.bare:
        raise UnsupportedError(
            f"draft model {checkpoint.path} is a checkpoint for method={found.name!r}, not for method={row.name!r}; "
            "set method to what it is, or leave method unset"
        )
    row = row or found
    if row.of_target:
        if target is None:
            return DraftInfo(method=row.name)
        if folder.samefile(target.path):
            checkpoint = target
    return _read(row, checkpoint, speculative, target)


def _read(
    row: Method, checkpoint: CheckpointConfig, speculative: SpeculativeConfig, target: ModelConfig | None
) -> DraftInfo:
    """DraftInfo that the method's own reader returns.

    Layers among the target's weights have no checkpoint of their own.
    """
    assert row.checkpoint is not None
    found = cast("DraftInfo", row.checkpoint.open()(checkpoint, speculative))
    return replace(found, checkpoint=None, max_model_len=None) if checkpoint is target else found


def read_target(path: str | os.PathLike[str]) -> ModelConfig:
    """Read the target's config.json.

    UnsupportedError for a checkpoint that is no decoder. It names what the checkpoint is, not the fields that it lacks.
    """
    checkpoint = read_checkpoint(path, "target")
    if MARK in checkpoint.raw:
        raise CheckpointError(f"engine {checkpoint.path}: target is missing; copy it again or rebuild the engine")
    name = architecture_of(checkpoint)
    heads = (row for row in METHODS.values() if row.recognises is not None and not row.of_target)
    if any(row.recognises.open()(checkpoint) for row in heads if row.recognises):
        raise UnsupportedError(
            f"target model {checkpoint.path} is a draft head ({name or checkpoint.model_type}); give it as model in "
            "speculative_config, and the model that it drafts for as the target"
        )
    if name:
        require_architecture(name, checkpoint.path)
    return ModelConfig.of(checkpoint, "target")


def map_draft_vocabulary(target: ModelConfig, draft: ModelConfig) -> VocabularyMap:
    """Map the tokens that the tokenizers in the two folders have in common, for use_heterogeneous_vocab.

    ConfigError if a tokenizer is missing or no token is in common. It warns if only few are.
    """
    ours, theirs = _tokenizer(target, "target"), _tokenizer(draft, "draft")
    found = map_vocabularies(ours, theirs, target.vocab_size, draft.vocab_size, draft.eos_token_ids)
    size, count = ours.vocab_size, found.num_common
    words = f"{count} of the target's {size} tokens are among the {theirs.vocab_size} of the draft {draft.path}"
    if count == 0:
        raise ConfigError(
            f"use_heterogeneous_vocab=True: {words}, so it can guess nothing; use a draft with more of the target's "
            "tokens, or method='ngram'"
        )
    if count < _FEW_TOKENS or count < _SMALL_SHARE * size:
        logger.warning("use_heterogeneous_vocab: only %s; it can guess no others", words)
    else:
        logger.info("use_heterogeneous_vocab: %s", words)
    return found


def _tokenizer(model: ModelConfig, role: str) -> Tokenizer:
    found = Tokenizer.from_folder(model.path)
    if found is None:
        raise ConfigError(
            f"use_heterogeneous_vocab=True compares tokenizers, and there is no tokenizer.json in the {role} model "
            f"{model.path}; put the model's own there"
        )
    return found
