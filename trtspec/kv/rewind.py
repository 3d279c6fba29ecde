"""Rewind: keep the accepted rows, drop the rest.

For a chain this is a truncation: later rows are simply overwritten.
"""

from __future__ import annotations

from trtspec.kv.blocks import SequenceKV


def commit(kv: SequenceKV, num_rows: int, num_tokens: int, num_drafts: int, draft_layers: bool = False) -> None:
    """Commit a step of `num_rows` rows, `num_drafts` of them drafts, that emitted `num_tokens` tokens.

    It keeps the rows of known tokens and of the num_tokens - 1 accepted drafts. A chunk that emits nothing has no
    drafts. kv.draft_kv_len, the length of the valid draft KV, never exceeds the target's, as later rows were computed
    from rejected drafts. draft_layers: the step ran draft layers over the same rows. They extend the draft KV only if
    it had no gap before.
    """
    extended = draft_layers and kv.draft_kv_len >= kv.committed
    kv.committed += num_rows - num_drafts + (num_tokens - 1 if num_tokens else 0)
    if extended or kv.draft_kv_len > kv.committed:
        kv.draft_kv_len = kv.committed
