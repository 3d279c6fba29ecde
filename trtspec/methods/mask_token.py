"""The mask token ("guess here") in the config.json of a draft for parallel drafting."""

from __future__ import annotations

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.reader import Reader

# Names of the mask token in public drafts: PARD's, that of vLLM's speculators, and P-EAGLE's.
MASK_TOKEN_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


def mask_token_id(draft: CheckpointConfig) -> int | None:
    """Return the first of MASK_TOKEN_KEYS that config.json has; None if it has none of them.

    CheckpointError for a value that is no token id.
    """
    read = Reader(dict(draft.raw), draft.path / "config.json", "draft")
    key = next((key for key in MASK_TOKEN_KEYS if read.get(key) is not None), None)
    return None if key is None else read.integer(key)
