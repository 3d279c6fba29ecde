"""Draft trees in TensorRT-LLM's decoding configs."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec.errors import ConfigError
from trtspec.interop.decoding_configs import DraftTargetDecodingConfig, Eagle3DecodingConfig, MedusaDecodingConfig


@pytest.mark.parametrize("total", [3, 9])
def test_dynamic_tree_sizes_that_fit(total: int) -> None:
    Eagle3DecodingConfig(use_dynamic_tree=True, dynamic_tree_max_topK=3, max_draft_len=3, max_total_draft_tokens=total)


def test_a_dynamic_tree() -> None:
    eagle = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 3, "speculative_model": "/e"}
    config = Eagle3DecodingConfig(**eagle).to_speculative_config()
    assert (config.max_total_draft_tokens, config.dynamic_tree_max_topK, config.num_speculative_tokens) == (6, 2, 3)
    assert Eagle3DecodingConfig(**eagle, max_total_draft_tokens=4).to_speculative_config().max_total_draft_tokens == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dynamic_tree_max_topK": 4, "max_draft_len": 3}, "dynamic_tree_max_topK=4 without use_dynamic_tree"),
        ({"use_dynamic_tree": True, "max_draft_len": 3}, "dynamic_tree_max_topK=None, .*; set the first two"),
        (
            {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 1, "eagle_choices": [[0]]},
            "and not the last",
        ),
    ],
)
def test_a_dynamic_tree_that_is_half_described(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Eagle3DecodingConfig(**fields).to_speculative_config()


def test_the_depth_of_the_paths_is_the_draft_length(caplog: pytest.LogCaptureFixture) -> None:
    """Published examples of Medusa have the number of paths as max_draft_len."""
    config = MedusaDecodingConfig(max_draft_len=3, num_medusa_heads=2, medusa_choices=[[0], [1], [0, 0]])
    assert config.to_speculative_config().num_speculative_tokens == 2
    assert "max_draft_len=3 is not used: the paths of medusa_choices are 2 deep" in caplog.text


@pytest.mark.parametrize("text", ["[[0], [0,", "[0]", "x", "-" * 100_000 + "1"])
def test_a_text_that_is_no_list_of_paths_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="eagle_choices"):
        Eagle3DecodingConfig(eagle_choices=text)  # type: ignore[arg-type]


def test_a_number_of_nodes_alone_is_no_tree() -> None:
    config = DraftTargetDecodingConfig(max_draft_len=3, max_total_draft_tokens=7, speculative_model="/d")
    with pytest.raises(ConfigError, match="max_total_draft_tokens=5 with max_draft_len=5 is a tree"):
        Eagle3DecodingConfig(
            eagle_choices=[[0], [1], [0, 0]], max_draft_len=5, max_total_draft_tokens=5, speculative_model="/e"
        ).to_speculative_config()
    with pytest.raises(ConfigError, match="max_total_draft_tokens=7 with max_draft_len=3 is a tree; give its paths"):
        config.to_speculative_config()
