"""Configs of every method, and their exports, for the tests of interop."""

from __future__ import annotations

from typing import Any

from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.interop.export import export_settings

HEAD = DraftInfo(method="eagle3", vocab_size=100, max_model_len=512, capture_layers=(2, 5, 8))
TRT, VLLM = "tensorrt-llm", "vllm"

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
DRAFTED: dict[str, Any] = {"method": "draft_model", "model": "/d", "num_speculative_tokens": 3}
EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "/e", "num_speculative_tokens": 3}
DFLASH: dict[str, Any] = {"method": "dflash", "model": "/f", "num_speculative_tokens": 3}
DSPARK: dict[str, Any] = {"method": "dspark", "model": "/s", "num_speculative_tokens": 3}
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
SUFFIX: dict[str, Any] = {"method": "suffix"}
SAVED: dict[str, Any] = {"method": "extract_hidden_states", "output_directory": "/o", "capture_layers": (1, 3)}
CUSTOM: dict[str, Any] = {"method": "custom_class", "drafter": "m:C", "num_speculative_tokens": 3}


def export(
    fields: dict[str, Any], server: str, draft: DraftInfo | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (settings, {field: the line about it})."""
    settings, found = export_settings(SpeculativeConfig(**fields), server, draft)
    lines = {warning.field: str(warning) for warning in found}
    assert len(lines) == len(found), "two lines about one field"
    assert all("\n" not in line for line in lines.values())
    return settings, lines


TREE = "[(0,), (1,), (0, 0), (0, 0, 0)]"
SYNTHETIC = {"rejection_sample_method": "synthetic"}
