"""What the user asks of speculation, together with the checkpoints that it is asked of."""

from __future__ import annotations

import os

from trtspec.config.eagle import EAGLE3_ARCHITECTURES, Eagle3Facts
from trtspec.config.engine import EngineConfig
from trtspec.config.model import ModelConfig
from trtspec.config.resolved import DraftInfo, ResolvedSpeculation, TargetInfo
from trtspec.config.speculative import SpeculativeConfig


def resolve_speculation(
    speculative: SpeculativeConfig | None, target: ModelConfig, max_seq_len: int, config: EngineConfig
) -> tuple[ModelConfig | None, ResolvedSpeculation | None]:
    """The draft checkpoint, if the method has one of its own, and speculation with every question answered."""
    if speculative is None:
        return None, None
    draft = None
    if speculative.model is not None and os.path.isdir(speculative.model):
        draft = ModelConfig.from_folder(speculative.model, "draft")
    resolved = speculative.resolve(
        TargetInfo(
            model=str(target.path),
            model_type=target.model_type,
            vocab_size=target.vocab_size,
            max_model_len=max_seq_len,
            num_hidden_layers=target.num_layers,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
        ),
        None if draft is None else draft_info(speculative, draft),
    )
    if not (resolved.mode.has_draft_model() or resolved.mode.need_load_draft_weights()):
        draft = None
    elif draft is None:
        draft = ModelConfig.from_folder(speculative.model or "", "draft")  # says what is wrong with the folder
    return draft, resolved


def draft_info(speculative: SpeculativeConfig, draft: ModelConfig) -> DraftInfo:
    """What resolution needs to know of the checkpoint that `speculative.model` names."""
    return DraftInfo(
        model_type=draft.model_type,
        vocab_size=draft.vocab_size,
        max_model_len=draft.max_seq_len,
        is_eagle3=draft.architecture in EAGLE3_ARCHITECTURES,
        capture_layers=Eagle3Facts.of(draft).capture_layers if _is_eagle3(speculative, draft) else None,
    )


def _is_eagle3(speculative: SpeculativeConfig, draft: ModelConfig) -> bool:
    """Also where the method is left to be guessed from the folder's name."""
    return speculative.method == "eagle3" or draft.architecture in EAGLE3_ARCHITECTURES
