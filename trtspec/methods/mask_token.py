"""What config.json of a draft for parallel drafting says: which token stands for "guess here"."""

from __future__ import annotations

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.reader import Reader

# The names that public drafts have for it: those of PARD, of vLLM's speculators, and of P-EAGLE.
MASK_TOKEN_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


def mask_token_id(draft: CheckpointConfig) -> int | None:
    """The first of those that is there. CheckpointError for what is no token id."""
    read = Reader(dict(draft.raw), draft.path / "config.json", "draft")
    key = next((key for key in MASK_TOKEN_KEYS if read.get(key) is not None), None)
    return None if key is None else read.integer(key)
