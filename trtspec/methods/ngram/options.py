"""How n-grams are looked up, and what AUTO chooses."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.options import MethodOptions

AUTO_MAX_CONCURRENCY = 32
"""Requests above which AUTO drafts nothing."""


@dataclass(frozen=True, kw_only=True)
class NGramOptions(MethodOptions):
    """prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are matched, in tokens. is_public_pool: None =
    no pool. ngram_pool_size: matches."""

    prompt_lookup_min: int
    prompt_lookup_max: int
    prompt_lookup_latest: bool
    is_public_pool: bool | None
    is_keep_all: bool
    ngram_pool_size: int

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """Both lengths unset are 5, 5; one that is unset copies the other."""
        low, high = lookup_sizes(config)
        sized = config.model_copy(update={"prompt_lookup_min": low, "prompt_lookup_max": high})
        return super().of(sized)


def lookup_sizes(config: SpeculativeConfig) -> tuple[int, int]:
    """(prompt_lookup_min, prompt_lookup_max) in tokens."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    return low or high or 5, high or low or 5


def suggest(config: SpeculativeConfig, max_batch_size: int) -> SpeculativeConfig:
    """AUTO: n-grams, with K and sizes by the batch, where the user did not say them."""
    k, longest = (5, 3) if max_batch_size <= 4 else (3, 5)
    chosen: dict[str, object] = {"method": "ngram"}
    if config.num_speculative_tokens is None:
        chosen["num_speculative_tokens"] = k
    if config.prompt_lookup_min is None and config.prompt_lookup_max is None:
        chosen |= {"prompt_lookup_min": 1, "prompt_lookup_max": longest}
    if config.max_concurrency is None and config.draft_len_schedule is None:
        chosen["max_concurrency"] = AUTO_MAX_CONCURRENCY
    return config.model_copy(update=chosen)
