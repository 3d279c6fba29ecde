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
    kv.committed += num_rows - draft_len + (num_tokens - 1 if num_tokens else 0)
    if extended or kv.draft_len > kv.committed:
        kv.draft_len = kv.committed
