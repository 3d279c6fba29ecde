"""Targets that carry their own draft layers (multi-token prediction), and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MtpRow:
    """Where a target keeps its MTP layers: the draft architecture and the config.json key that counts them."""

    architecture: str
    key: str = "num_nextn_predict_layers"
    default: int | None = None


# Target model_type -> its MTP layers. They start at layer index num_hidden_layers of the target.
MTP_TARGETS: dict[str, MtpRow] = {
    "deepseek_v3": MtpRow("DeepSeekMTPModel"),
    "deepseek_v32": MtpRow("DeepSeekMTPModel"),
    "mimo": MtpRow("MiMoMTPModel"),
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
    """Number of MTP layers a target's config.json announces (TargetInfo.n_predict); None if it has none."""
    row = MTP_TARGETS.get(str(config.get("model_type")))
    return None if row is None else config.get(row.key, row.default) or None
