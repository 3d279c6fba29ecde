"""Options of n-gram lookup, and the settings that AUTO chooses."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.options import MethodOptions

AUTO_MAX_CONCURRENCY = 32
"""Number of requests above which AUTO drafts nothing."""


@dataclass(frozen=True, kw_only=True)
class NGramOptions(MethodOptions):
    """Options of the method "ngram".

    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are matched, in tokens. is_public_pool: None = no
    pool. ngram_pool_size: number of matches in a pool.
    """

    prompt_lookup_min: int
    prompt_lookup_max: int
    prompt_lookup_latest: bool
    is_public_pool: bool | None
    is_keep_all: bool
    ngram_pool_size: int

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """Return the options. If both lengths are unset, both are 5; if one is unset, it copies the other."""
        low, high = lookup_sizes(config)
        sized = config.model_copy(update={"prompt_lookup_min": low, "prompt_lookup_max": high})
        return super().of(sized)


def lookup_sizes(config: SpeculativeConfig) -> tuple[int, int]:
    """Return (prompt_lookup_min, prompt_lookup_max) in tokens."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    return low or high or 5, high or low or 5


def suggest(config: SpeculativeConfig, max_batch_size: int) -> SpeculativeConfig:
    """Return the config of AUTO: n-grams. K and lengths that the user did not set depend on the batch size."""
    k, longest = (5, 3) if max_batch_size <= 4 else (3, 5)
    chosen: dict[str, object] = {"method": "ngram"}
    if config.num_speculative_tokens is None:
        chosen["num_speculative_tokens"] = k
    if config.prompt_lookup_min is None and config.prompt_lookup_max is None:
        chosen |= {"prompt_lookup_min": 1, "prompt_lookup_max": longest}
    if config.max_concurrency is None and config.draft_len_schedule is None:
        chosen["max_concurrency"] = AUTO_MAX_CONCURRENCY
    return config.model_copy(update=chosen)
