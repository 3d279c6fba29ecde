"""How large the launches of an engine may become."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtspec.config.engine import EngineConfig
from trtspec.methods.step import Step


@dataclass(frozen=True)
class Sizes:
    """The open sizes of a step's graphs at their largest. rows: T; draft_len: K, of a target that verifies drafts of a
    drafter beside it, too."""

    batch_size: int
    rows: int
    draft_len: int
    columns: int  # of block tables
    blocks: int  # of the cache, scratch included
    block_size: int
    linear: bool = False  # caches as TensorRT's own attention wants them; see tensorrt/native.py

    @classmethod
    def of(cls, config: EngineConfig, max_seq_len: int, draft_len: int, blocks: int) -> Sizes:
        """From the limits: a sequence's table covers the drafts of this step and the next, too."""
        reserved = max_seq_len + 2 * draft_len
        columns = -(-reserved // config.block_size)
        return cls(config.max_batch_size, config.max_num_tokens, draft_len, columns, blocks, config.block_size)

    def at_draft_len(self, step: Step, draft_len: int) -> Sizes:
        """Those of a step's graph for K; a step that verifies no drafts in its graph takes whatever it is given."""
        return replace(self, draft_len=draft_len) if step.verifies_drafts else self
