"""The method of a SpeculativeConfig and the checkpoint that drafts: as given, from config.json, or by a name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.spec_plan_cases import DRAFTED, NGRAM, decide, draft
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.planning import choose, recognise
from trtspec.methods.table import METHODS
from trtspec.modes import SpeculativeDecodingMode as M


def chosen(fields: Mapping[str, Any], info: DraftInfo | None) -> tuple[str, str | None]:
    row, model = choose(SpeculativeConfig(**fields), info)
    assert row is METHODS[row.name]
    return row.name, model


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"model": "ngram"}, None, ("ngram", None)),
        ({"model": "[ngram]"}, None, ("ngram", None)),
        ({"method": "ngram"}, None, ("ngram", None)),
        ({"method": "ngram", "model": "ngram"}, None, ("ngram", None)),
        ({"method": "suffix"}, None, ("suffix", None)),
        ({"method": "suffix", "model": "suffix"}, None, ("suffix", None)),
        ({"method": "mtp"}, None, ("mtp", None)),
        ({"method": "mtp"}, "mtp", ("mtp", None)),
        ({"method": "mtp", "model": "/m"}, None, ("mtp", "/m")),
        ({"model": "yuhuili/EAGLE-LLaMA3"}, None, ("eagle", "yuhuili/EAGLE-LLaMA3")),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1"}, None, ("eagle3", "yuhuili/EAGLE3-LLaMA3.1")),
        ({"model": "/data/llama-eagle3/"}, None, ("eagle3", "/data/llama-eagle3/")),
        ({"model": "/eagle-lab/draft"}, None, ("draft_model", "/eagle-lab/draft")),
        ({"model": "/x/EAGLE3-a", "method": "draft_model"}, None, ("draft_model", "/x/EAGLE3-a")),
        ({"model": "/x/EAGLE3-a", "method": "draft_model"}, "eagle3", ("draft_model", "/x/EAGLE3-a")),
        ({"model": "/models/head"}, "eagle3", ("eagle3", "/models/head")),  # whatever its folder is called
        ({"model": "/models/eagle3"}, "eagle", ("eagle", "/models/eagle3")),
        ({"model": "/x"}, "medusa", ("medusa", "/x")),
        ({"model": "/x"}, "mlp_speculator", ("mlp_speculator", "/x")),
        ({"model": "/x"}, "dflash", ("dflash", "/x")),
        ({"model": "/x"}, "mtp", ("mtp", "/x")),
        ({"model": "/x"}, "draft_model", ("draft_model", "/x")),
        ({"model": "/x"}, None, ("draft_model", "/x")),
        ({"method": "custom_class", "drafter": "m:C"}, None, ("custom_class", None)),
    ],
)
def test_choose(fields: dict[str, Any], kind: str | None, expected: tuple[str, str | None]) -> None:
    """A method that is given wins, then the kind that the checkpoint was found to be, then its folder's name."""
    assert chosen(fields, None if kind is None else draft(method=kind)) == expected


@pytest.mark.parametrize(
    ("fields", "mode", "model"),
    [
        (NGRAM, M.NGRAM, None),
        ({**NGRAM, "model": "ngram"}, M.NGRAM, None),
        ({"method": "suffix", "model": "suffix"}, M.SUFFIX, None),
        ({"method": "mtp", "num_speculative_tokens": 1}, M.MTP_EAGLE_ONE_MODEL, "/models/target"),
        (DRAFTED, M.DRAFT_TARGET, "/models/draft"),
        ({"method": "custom_class", "drafter": "m:C", "num_speculative_tokens": 2}, M.USER_PROVIDED, None),
    ],
)
def test_the_checkpoint_that_drafts(fields: dict[str, Any], mode: M, model: str | None) -> None:
    spec_plan = decide(fields)
    assert (spec_plan.mode, spec_plan.model) == (mode, model)


def architecture(name: str) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": [name]}


@pytest.mark.parametrize(
    ("folder", "raw", "expected"),
    [
        ("x", {"model_type": "medusa"}, "medusa"),
        ("eagle3", {"model_type": "medusa"}, "medusa"),
        ("x", {"medusa_num_heads": 4}, "medusa"),  # FasterDecoding's layout
        ("x", {"model_type": "llama", "medusa_num_heads": 4}, "draft_model"),
        ("x", {"model_type": "mlp_speculator"}, "mlp_speculator"),
        ("eagle-x", {"model_type": "mlp_speculator"}, "mlp_speculator"),
        ("x", {"model_type": "deepseek_mtp"}, "mtp"),
        ("x", {"model_type": "qwen3_next"}, "mtp"),
        ("x", {"model_type": "mimo"}, "mtp"),
        ("eagle3", {"model_type": "mimo"}, "eagle3"),  # a head in its family's layout
        ("head", architecture("LlamaForCausalLMEagle3"), "eagle3"),
        ("head", architecture("Eagle3LlamaForCausalLM"), "eagle3"),
        ("eagle-head", architecture("Qwen3ForCausalLMEagle3"), "eagle3"),
        ("head", architecture("Eagle3DeepseekV2ForCausalLM"), "eagle3"),  # which eagle3 refuses
        ("eagle-head", architecture("PeagleLlamaForCausalLM"), "eagle3"),
        ("head", architecture("EagleLlamaForCausalLM"), "eagle"),
        ("eagle3", architecture("EagleLlamaForCausalLM"), "eagle"),
        ("x", architecture("DFlashDraftModel"), "dflash"),
        ("eagle3", architecture("DFlashDraftModel"), "dflash"),
        ("EAGLE-LLaMA3", architecture("LlamaForCausalLM"), "eagle"),  # as most public heads are written
        ("EAGLE3-LLaMA3.1", architecture("LlamaForCausalLM"), "eagle3"),
        ("eagle-lab/draft", architecture("LlamaForCausalLM"), "draft_model"),
        ("draft", architecture("LlamaForCausalLM"), "draft_model"),
        ("draft", {"model_type": "llama"}, "draft_model"),
        ("draft", {}, "draft_model"),
    ],
)
def test_recognise(folder: str, raw: dict[str, Any], expected: str) -> None:
    checkpoint = CheckpointConfig(path=Path("/models") / folder, model_type=raw.get("model_type", ""), raw=raw)
    assert recognise(checkpoint) is METHODS[expected]
