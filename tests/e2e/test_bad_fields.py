"""Fields of a speculative_config that are wrong whatever the checkpoint, and objects that are no speculative_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.refused import K2, assert_refused
from trtspec import LLM
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CapacityError, ConfigError
from trtspec.methods.suffix.drafter import SuffixTree

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SUFFIX = "suffix_decoding_"
FIELDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "K = 0": ({**NGRAM, "num_speculative_tokens": 0}, ("=0: input should be greater than", "leave speculative_config")),
    "negative K": (
        {**NGRAM, "num_speculative_tokens": -1},
        ("tokens=-1: ", "greater than or equal to 1"),
    ),
    "K in quotes": ({**NGRAM, "num_speculative_tokens": "3"}, ("num_speculative_tokens='3'", "valid integer")),
    "a field that does not exist": ({**NGRAM, "num_speculative_token": 3}, ("did you mean 'num_speculative_tokens'?",)),
    "a method that does not exist": (
        {**NGRAM, "method": "eagel3"},
        ("method='eagel3' is unknown", "use one of auto, custom_class, dflash"),
    ),
    "n-grams longer than the longest": (
        {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
        ("prompt_lookup_min=4 exceeds prompt_lookup_max=2", "lower it to at most 2"),
    ),
    "a pool of nothing": (
        {**NGRAM, "is_public_pool": True, "ngram_pool_size": 0},
        ("ngram_pool_size=0", "or equal to 1"),
    ),
    "no drafter": ({"method": "custom_class", **K2}, ("drafter=None", "set drafter='module:Class' or an object")),
    **{
        f"{name}={value}": ({"method": "suffix", SUFFIX + name: value}, (f"{SUFFIX}{name}={value}: ", remedy))
        for name, value, remedy in (
            ("max_tree_depth", 0, "greater than or equal to 1"),
            ("max_cached_requests", -1, "greater than or equal to 0 (responses kept"),
            ("max_cached_requests", 10**7, "less than or equal to 1000000 (responses kept"),
            ("max_spec_factor", -0.5, "greater than or equal to 0"),
            ("max_spec_factor", float("nan"), "a finite number"),
            ("min_token_prob", 1.5, "less than or equal to 1"),
            ("min_token_prob", -0.1, "greater than or equal to 0"),
        )
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """SpeculativeConfig refuses a wrong field. LLM and `trtspec build` repeat its message."""
    fields, words = FIELDS[name]
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**fields)
    assert_refused(target, fields, ConfigError, (*words, str(caught.value)), tmp_path, capsys)


@pytest.mark.parametrize("spec", [[1], "ngram", 3])
def test_what_is_no_speculative_config(target: Path, spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config=.*; use None, a dict, a SpeculativeConfig or"):
        LLM(target, spec)


def test_a_path_is_a_folder_as_text_is(target: Path, draft: Path) -> None:
    assert SpeculativeConfig(method="draft_model", model=draft, **K2).model == str(draft)


def test_a_tree_for_which_there_is_no_memory(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: SuffixTree, *sizes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(SuffixTree, "__init__", no_memory)
    with pytest.raises(CapacityError, match=r"cached_requests=10000: there is no memory .*; lower it"):
        LLM(target, {"method": "suffix"})
