"""What the user asks of speculation, together with the checkpoints that it is asked of."""

from __future__ import annotations

import logging
import os

from trtspec.config.checkpoint.folder import CheckpointConfig, read_checkpoint
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.resolved import DraftInfo, ResolvedSpeculation, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.dflash.checkpoint import DFLASH, DFLASH_ARCHITECTURE, DFlashFacts
from trtspec.methods.eagle3.checkpoint import EAGLE3_ARCHITECTURES, P_EAGLE_ARCHITECTURES, Eagle3Facts, EagleFacts
from trtspec.methods.medusa.checkpoint import MEDUSA, MedusaFacts
from trtspec.methods.mlp_speculator.checkpoint import MLP_SPECULATOR, MLPSpeculatorFacts
from trtspec.methods.mtp.checkpoint import mtp_layers, require_mtp
from trtspec.methods.parallel.checkpoint import mask_token_id
from trtspec.methods.resolve import WITHOUT_CHECKPOINT, method_and_model, resolve
from trtspec.models.specs import require_architecture
from trtspec.modes import METHODS_WITHOUT_MODE
from trtspec.text import Tokenizer
from trtspec.text.vocabulary import VocabularyMap, map_vocabularies

logger = logging.getLogger(__name__)

_FEW_TOKENS, _SMALL_SHARE = 100, 0.1

# Drafts that are no decoders, by method and model_type; all others are.
_HEADS: dict[str, type[MedusaFacts | MLPSpeculatorFacts]] = {
    MEDUSA: MedusaFacts,
    MLP_SPECULATOR: MLPSpeculatorFacts,
}


def resolve_speculation(
    speculative: SpeculativeConfig | None, target: ModelConfig, max_seq_len: int, config: EngineConfig
) -> tuple[CheckpointConfig | None, ResolvedSpeculation | None]:
    """The draft checkpoint, if the method has one of its own, and speculation with every question answered."""
    if speculative is None:
        return None, None
    draft, info = None, None
    if method_and_model(speculative, None, None)[0] not in (*WITHOUT_CHECKPOINT, *METHODS_WITHOUT_MODE, "mtp"):
        draft, info = read_draft(speculative)  # says what is wrong with the folder
    if method_and_model(speculative, None, info)[0] == "mtp":
        speculative = _of_target(speculative, target)
    resolved = resolve(
        speculative,
        TargetInfo(
            model=str(target.path),
            model_type=target.model_type,
            vocab_size=target.vocab_size,
            max_model_len=max_seq_len,
            num_hidden_layers=target.num_layers,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            n_predict=mtp_layers(target.raw),
            quantization=config.quantization,
        ),
        info,
    )
    if resolved.mode.traits.mtp or not (resolved.mode.has_draft_model() or resolved.mode.need_load_draft_weights()):
        draft = None
    return draft, resolved


def read_draft(speculative: SpeculativeConfig) -> tuple[CheckpointConfig, DraftInfo]:
    """The checkpoint that `speculative.model` names, a ModelConfig where it is a decoder, and what resolution needs to
    know of it. What it is, the method says, else its config.json."""
    draft = read_checkpoint(speculative.model or "", "draft")
    kind = _kind(draft)
    facts = _HEADS.get(speculative.method or kind)
    if facts is not None:
        return draft, facts.of(draft).info
    if kind in _HEADS:
        raise UnsupportedError(
            f"draft model {draft.path} is a checkpoint for method={kind!r}, not for method={speculative.method!r}; set "
            "method to what it is, or leave method unset"
        )
    model = ModelConfig.from_folder(draft.path, "draft")
    return model, draft_info(speculative, model)


def read_target(path: str | os.PathLike[str]) -> ModelConfig:
    """The target's config.json. What is no decoder is refused for what it is, not for the fields that it lacks:
    UnsupportedError."""
    checkpoint = read_checkpoint(path, "target")
    name = next(iter(checkpoint.raw.get("architectures") or ()), None)
    kind = _kind(checkpoint)
    if kind in (*_HEADS, "eagle") or name in (*EAGLE3_ARCHITECTURES, *P_EAGLE_ARCHITECTURES):
        raise UnsupportedError(
            f"target model {checkpoint.path} is a draft head ({name or kind}); give it as model in speculative_config, "
            "and the model that it drafts for as the target"
        )
    if isinstance(name, str):
        require_architecture(name, checkpoint.path)
    return ModelConfig.from_folder(path, "target")


def _kind(checkpoint: CheckpointConfig) -> str:
    """What it says it is, "" where it does not."""
    return checkpoint.model_type or (MEDUSA if "medusa_num_heads" in checkpoint.raw else "")


def _of_target(speculative: SpeculativeConfig, target: ModelConfig) -> SpeculativeConfig:
    """MTP without a `model`, for its modules are the target's own: ConfigError for others; see also require_mtp."""
    require_mtp(target.raw, target.path)
    model = speculative.model
    if model is not None and not (os.path.isdir(model) and os.path.samefile(model, target.path)):
        raise ConfigError(
            f"model={model!r} with method='mtp': MTP layers are read from the target's own checkpoint, {target.path}; "
            "leave model unset"
        )
    return speculative.model_copy(update={"method": "mtp", "model": None})


def draft_info(speculative: SpeculativeConfig, draft: ModelConfig) -> DraftInfo:
    """Of a decoder, or what is described like one."""
    if speculative.method == DFLASH or (speculative.method is None and draft.architecture == DFLASH_ARCHITECTURE):
        return DFlashFacts.of(draft).info(draft)
    parallel = speculative.parallel_drafting
    return DraftInfo(
        model_type=draft.model_type,
        vocab_size=draft.vocab_size,
        max_model_len=draft.max_seq_len,
        is_eagle=EagleFacts.is_named_in(draft),
        is_eagle3=_is_named_eagle3(draft),
        capture_layers=Eagle3Facts.of(draft, parallel).capture_layers if _is_eagle3(speculative, draft) else None,
        mask_token_id=mask_token_id(draft) if parallel else None,
    )


def _is_eagle3(speculative: SpeculativeConfig, draft: ModelConfig) -> bool:
    """Also where the method is left to be guessed from the folder's name."""
    return speculative.method == "eagle3" or _is_named_eagle3(draft)


def _is_named_eagle3(draft: ModelConfig) -> bool:
    return draft.architecture in (*EAGLE3_ARCHITECTURES, *P_EAGLE_ARCHITECTURES)


def map_draft_vocabulary(target: ModelConfig, draft: ModelConfig) -> VocabularyMap:
    """For use_heterogeneous_vocab: what the tokenizers in the two folders have in common.

    ConfigError where one of them is missing, or they have no token in common; a warning where there are few.
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
