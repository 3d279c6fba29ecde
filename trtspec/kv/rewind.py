"""Keep the accepted rows, give back the rest. For a chain that is a truncation: later rows are simply overwritten."""

from __future__ import annotations

from trtspec.kv.blocks import SequenceKV


def commit(kv: SequenceKV, num_rows: int, num_tokens: int, draft_len: int, draft_layers: bool = False) -> None:
    """After a step of `num_rows` rows, `draft_len` of them drafts, that emitted `num_tokens` tokens.

    Kept are the rows that held known tokens and the accepted drafts, num_tokens - 1 of them (a chunk that emits nothing
    has no drafts). Draft KV is valid only as far as the target's, plus nothing: it saw the same rejected tokens.
    `draft_layers`: the step ran draft layers over the same rows, which is worth something only behind valid draft KV.
    """
    extended = draft_layers and kv.draft_len >= kv.committed
    accepted = max(num_tokens - 1, 0)
    kv.committed += num_rows - draft_len + accepted
    kv.draft_len = kv.committed if extended else min(kv.draft_len, kv.committed)
