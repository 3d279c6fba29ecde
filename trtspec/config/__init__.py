"""Configuration of speculation: what users write, and what it resolves to."""

from trtspec.config.capture import capture_layers_from_vllm, default_capture_layers
from trtspec.config.interop import export_settings, settings_text
from trtspec.config.interop_account import FieldWarning
from trtspec.config.mtp import MTP_TARGETS, mtp_layers
from trtspec.config.resolved import DraftInfo, ResolvedSpeculation, TargetInfo, draft_len_for_batch
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.trtllm import (
    AutoDecodingConfig,
    DecodingBaseConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    Eagle3DecodingConfig,
    MedusaDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PARDDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
    UserProvidedDecodingConfig,
)

__all__ = [
    "MTP_TARGETS",
    "AutoDecodingConfig",
    "DFlashDecodingConfig",
    "DSparkDecodingConfig",
    "DecodingBaseConfig",
    "DraftInfo",
    "DraftTargetDecodingConfig",
    "Eagle3DecodingConfig",
    "FieldWarning",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "NGramDecodingConfig",
    "PARDDecodingConfig",
    "ResolvedSpeculation",
    "SADecodingConfig",
    "SaveHiddenStatesDecodingConfig",
    "SpeculativeConfig",
    "TargetInfo",
    "UserProvidedDecodingConfig",
    "capture_layers_from_vllm",
    "default_capture_layers",
    "draft_len_for_batch",
    "export_settings",
    "mtp_layers",
    "settings_text",
]
