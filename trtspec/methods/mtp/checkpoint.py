"""Checkpoints with MTP layers (multi-token prediction), a target's or their own: number and structure of the layers."""

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
    """The structure that the modules of a family have in common.

    A module computes x = projection([norm(h); norm(e)]), then a decoder layer of the target's shapes, then a last norm.
    The last norm's output goes to an lm_head and to the next pass.

    token_norm, hidden_norm, projection, norm: names of the parts in a checkpoint, after the module's own name.
    hidden_first: False = [norm(e); norm(h)]. zero_first: the embedding counts as zeros at position 0. before_norm: h is
    the target's state before its last norm, not after it. head: name of the module's own lm_head, None = the target's
    is used.
    """

    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    zero_first: bool = False
    before_norm: bool = False
    head: str | None = None


# Names and order are those of vLLM's mimo_mtp.py and Xiaomi's modeling_mimo.py. Only vLLM, which runs the modules,
# zeroes the embedding at position 0. In vLLM, mimo.py, also by Xiaomi, returns states as they leave the last layer; the
# last norm belongs to the logits.
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
    """The MTP layers of a model_type.

    architecture: the draft architecture. key: the config.json key that counts the layers. default: their number where
    config.json lacks the key. family: their family, None = not built.
    """

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
    """Return the target's layers that its modules read, "after layer i", -1 = after the last norm."""
    row = MTP_TARGETS.get(model_type)
    return (num_hidden_layers - 1,) if row is not None and row.family is not None and row.family.before_norm else (-1,)


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether the checkpoint's family has MTP layers, or the checkpoint consists of such layers alone."""
    alone = checkpoint.model_type.endswith("_mtp") or _of_speculators(checkpoint.raw)
    return alone or checkpoint.model_type in MTP_TARGETS


def _of_speculators(config: Mapping[str, Any]) -> bool:
    """Whether the package `speculators` wrote this config (models/mtp/config.py).

    That package has Qwen3, Qwen3-Next and Qwen3.5, whose model_type is in transformer_layer_config. Its version 0.9 has
    no family whose MTP layers run here.
    """
    return config.get("speculators_model_type") == MTP


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return the facts about the modules in a checkpoint that planning needs.

    The checkpoint is the target's, or one of the modules' own, which is described like a target. Raises as require_mtp
    and ModelConfig.of do.
    """
    _, count = require_mtp(checkpoint.raw, checkpoint.path)
    model = checkpoint if isinstance(checkpoint, ModelConfig) else ModelConfig.of(checkpoint, "draft")
    return DraftInfo(method=MTP, max_model_len=model.max_seq_len, n_predict=count, checkpoint=model)


def check(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> None:
    """Raise ConfigError if the modules have a checkpoint of their own and it is of another family than the target."""
    own = None if draft is None else draft.checkpoint
    if own is not None and own.model_type != target.model_type:
        raise ConfigError(
            f"model={config.model!r} has MTP layers for model_type={own.model_type!r}, and this target is of "
            f"model_type={target.model_type!r}; use MTP layers that were trained for it, or method='draft_model' to "
            "draft with the whole checkpoint"
        )


def capture_layers(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> tuple[int, ...]:
    """Return the layers that the modules of the target's family read."""
    return mtp_capture_layers(target.model_type, target.num_hidden_layers)


def require_mtp(config: Mapping[str, Any], folder: Path) -> tuple[MtpFamily, int]:
    """Return family and number of the modules of the checkpoint in `folder`, whose config.json is `config`.

    Raises UnsupportedError for modules that are not built, ConfigError if there are none, CheckpointError for an
    invalid number.
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
