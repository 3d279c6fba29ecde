"""A target, its drafts and short configs, for the tests that plan speculation from a SpeculativeConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trtspec.config.speculation_plan import DraftInfo, SpeculationPlan, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.planning import plan_speculation

TARGET = TargetInfo(
    model="/models/target",
    model_type="llama",
    vocab_size=4096,
    max_model_len=1024,
    num_hidden_layers=8,
    max_batch_size=8,
)
DRAFT = DraftInfo(method="draft_model", vocab_size=4096, max_model_len=512)
DRAFTED: dict[str, Any] = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


def target(**changes: Any) -> TargetInfo:
    return dataclasses.replace(TARGET, **changes)


def draft(**changes: Any) -> DraftInfo:
    return dataclasses.replace(DRAFT, **changes)


def modules(n_predict: int | None) -> dict[str, Any]:
    """Fields of DraftInfo for the MTP layers that a target's own checkpoint holds."""
    return {"method": "mtp", "vocab_size": None, "max_model_len": None, "n_predict": n_predict}


def decide(fields: Mapping[str, Any], **changes: Any) -> SpeculationPlan:
    return plan_speculation(SpeculativeConfig(**fields), target(**changes))
