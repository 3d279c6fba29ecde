"""Checkpoints with MTP layers (multi-token prediction), a target's or their own: how many, and how they look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError

MTP = "mtp"


@dataclass(frozen=True)
class MtpFamily:
    """What the modules of a family have in common: x = projection([norm(h); norm(e)]), a decoder layer of the target's
    shapes, a last norm, whose output goes to an lm_head and to the next pass.

    token_norm, hidden_norm, projection, norm: what the parts are called in a checkpoint, behind the module's own name.
    hidden_first: False = [norm(e); norm(h)]. zero_first: the embedding counts as zeros at position 0. before_norm: h is
    the target's state before its last norm, not after it. head: the part that is its own lm_head, None = the target's
    serves.
    """

    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    zero_first: bool = False
    before_norm: bool = False
    head: str | None = None


# Names and order as in vLLM's mimo_mtp.py and Xiaomi's modeling_mimo.py; only vLLM, which runs them, zeroes. There
# mimo.py, by Xiaomi too, hands out states as they leave the last layer: its norm belongs to the logits.
MIMO = MtpFamily(
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    hidden_first=True,
    zero_first=True,
    before_norm=True,
)


@dataclass(frozen=True)
class MtpRow:
    """MTP layers of a model_type: the draft architecture, the config.json key that counts them, and their family, None
    = not built."""

    architecture: str
    key: str = "num_nextn_predict_layers"
    default: int | None = None
    family: MtpFamily | None = None


# Target model_type -> its MTP layers. They start at layer index num_hidden_layers of the target.
MTP_TARGETS: dict[str, MtpRow] = {
    "deepseek_v3": MtpRow("DeepSeekMTPModel"),
    "deepseek_v32": MtpRow("DeepSeekMTPModel"),
    "mimo": MtpRow("MiMoMTPModel", family=MIMO),
    "glm4_moe": MtpRow("Glm4MoeMTPModel"),
    "ernie4_5_moe": MtpRow("ErnieMTPModel"),
    "qwen3_next": MtpRow("Qwen3NextMTP"),
    "longcat_flash": MtpRow("LongCatFlashMTPModel", default=1),
    "pangu_ultra_moe": MtpRow("OpenPanguMTPModel"),
    "step3p5": MtpRow("Step3p5MTP", default=1),
    "gemma4_assistant": MtpRow("Gemma4MTPModel", default=1),
    "qwen3_5": MtpRow("Qwen3_5MTP", key="mtp_num_hidden_layers"),
}


def mtp_layers(config: Mapping[str, Any]) -> int | None:
    """Number of MTP layers that a config.json announces (DraftInfo.n_predict); None if it has none."""
    row = MTP_TARGETS.get(str(config.get("model_type")))
    return None if row is None else config.get(row.key, row.default) or None


def mtp_capture_layers(model_type: str, num_hidden_layers: int) -> tuple[int, ...]:
    """What the modules of such a target read of it, "after layer i", -1 = after its last norm."""
    row = MTP_TARGETS.get(model_type)
    return (num_hidden_layers - 1,) if row is not None and row.family is not None and row.family.before_norm else (-1,)


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether its family has MTP layers, or it is such layers alone."""
    alone = checkpoint.model_type.endswith("_mtp") or _of_speculators(checkpoint.raw)
    return alone or checkpoint.model_type in MTP_TARGETS


def _of_speculators(config: Mapping[str, Any]) -> bool:
    """Whether the package `speculators` wrote it (models/mtp/config.py). That has Qwen3, Qwen3-Next and Qwen3.5, whose
    model_type is in transformer_layer_config; of version 0.9 no family whose MTP layers run here."""
    return config.get("speculators_model_type") == MTP


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """What resolution needs to know of the modules in a checkpoint: the target's, or one of their own, which is
    described like a target. Raises as require_mtp does, and as ModelConfig.of."""
    _, count = require_mtp(checkpoint.raw, checkpoint.path)
    model = checkpoint if isinstance(checkpoint, ModelConfig) else ModelConfig.of(checkpoint, "draft")
    return DraftInfo(method=MTP, max_model_len=model.max_seq_len, n_predict=count, checkpoint=model)


def check(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> None:
    """ConfigError for modules of a checkpoint of their own that is of another family than the target."""
    own = None if draft is None else draft.checkpoint
    if own is not None and own.model_type != target.model_type:
        raise ConfigError(
            f"model={config.model!r} has MTP layers for model_type={own.model_type!r}, and this target is of "
            f"model_type={target.model_type!r}; use MTP layers that were trained for it, or method='draft_model' to "
            "draft with the whole checkpoint"
        )


def capture_layers(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> tuple[int, ...]:
    """As the target's family has it."""
    return mtp_capture_layers(target.model_type, target.num_hidden_layers)


def require_mtp(config: Mapping[str, Any], folder: Path) -> tuple[MtpFamily, int]:
    """Family and number of the modules of the checkpoint in `folder`, whose config.json is `config`.

    Raises UnsupportedError for modules that are not built, ConfigError where it has none, CheckpointError for a number
    that is none.
    """
    foreign, layer = _of_speculators(config), config.get("transformer_layer_config")
    kind = str((layer if foreign and isinstance(layer, dict) else config).get("model_type"))
    row = MTP_TARGETS.get(kind)
    if row is None or row.family is None or foreign:
        built = ", ".join(name for name, one in MTP_TARGETS.items() if one.family is not None)
        what = "in the layout of speculators are not built" if foreign else "are not built" if row else "are not known"
        raise UnsupportedError(
            f"method='mtp': MTP layers of model_type={kind!r} ({folder}) {what}; those of {built} run, in the layout "
            "of their targets. Use another method"
        )
    count = mtp_layers(config)
    if count is None:
        raise ConfigError(
            f"method='mtp': {row.key} is missing or 0 in {folder / 'config.json'}, so there are no MTP layers in that "
            "folder; use a checkpoint that has them, or another method"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise CheckpointError(
            f"method='mtp': {row.key} = {count!r} in {folder / 'config.json'} is no number of layers; correct it"
        )
    return row.family, count
