"""How many tokens are drafted: K, from what the user said, the checkpoint implies and AUTO chooses."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError

# Methods whose heads draft one token each.
STATE_HEADS = ("medusa", "mlp_speculator")


@dataclass(frozen=True)
class Suggestion:
    """AUTO's choice: n-gram speculation sized by the batch."""

    k: int
    ngram: int
    max_concurrency: int = 32


def suggest(max_batch_size: int) -> Suggestion:
    return Suggestion(k=5, ngram=3) if max_batch_size <= 4 else Suggestion(k=3, ngram=5)


def num_speculative_tokens(
    config: SpeculativeConfig,
    method: str,
    n_predict: int | None,
    auto: Suggestion | None = None,
    vanilla: bool = False,
) -> int:
    """K: what the user said, else what the checkpoint (or the method) implies. Raises ConfigError if nothing does.

    vanilla: each draft is made by a module of its own.
    """
    k = config.num_speculative_tokens
    if k is None:
        implied = {"suffix": config.suffix_decoding_max_tree_depth, "extract_hidden_states": 1}.get(method)
        k = auto.k if auto else implied or n_predict
    elif n_predict is not None and k > n_predict and method in STATE_HEADS:
        raise ConfigError(
            f"num_speculative_tokens={k} exceeds the {n_predict} heads of the draft checkpoint, each of which drafts "
            f"one token; use at most {n_predict}"
        )
    elif n_predict is not None and k > n_predict and method == "dflash":
        raise ConfigError(
            f"num_speculative_tokens={k} exceeds the {n_predict} masks of a block (block_size - 1) that the draft was "
            f"trained on; use at most {n_predict}"
        )
    elif n_predict is not None and vanilla and k > n_predict:
        other = "one_engine=False" if n_predict > 1 else "vanilla=False"
        raise ConfigError(
            f"num_speculative_tokens={k} with n_predict={n_predict}: each draft is made by an MTP module of its own; "
            f"use at most {n_predict}, or {other} to make all of them with the first"
        )
    elif n_predict is not None and k > n_predict and k % n_predict != 0:
        raise ConfigError(
            f"num_speculative_tokens={k} must be divisible by n_predict={n_predict} of the draft checkpoint; use "
            f"{k // n_predict * n_predict}"
        )
    if k is None:
        raise ConfigError(f"num_speculative_tokens=None and method={method!r} implies none; set it, to 3 for a start")
    return k
