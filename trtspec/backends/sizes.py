"""Largest sizes that the launches of an engine can have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtspec.config.engine import EngineConfig
from trtspec.methods.step import Step

LOGITS_DEPTH = 64
"""TensorRT's plugin for logits serves matrices [N, K] whose K is a multiple of this."""


@dataclass(frozen=True)
class Sizes:
    """The largest values of the dynamic sizes of a step's graphs.

    rows: T. draft_len: K, or the nodes of a tree, also for a target that verifies the drafts of a drafter outside its
    graph.
    """

    batch_size: int
    rows: int
    draft_len: int
    columns: int  # width of block tables
    blocks: int  # number of KV blocks, scratch included
    block_size: int
    linear: bool = False  # cache layout of TensorRT's own attention, see tensorrt/native.py

    @classmethod
    def of(cls, config: EngineConfig, max_seq_len: int, draft_len: int, blocks: int) -> Sizes:
        """Return the sizes for these limits. A block table also covers the drafts of this step and of the next."""
        reserved = max_seq_len + 2 * draft_len
        columns = -(-reserved // config.block_size)
        return cls(config.max_batch_size, config.max_num_tokens, draft_len, columns, blocks, config.block_size)

    def at_draft_len(self, step: Step, draft_len: int) -> Sizes:
        """Return the sizes of a step's graph for K = draft_len; the same if the step does not verify drafts in it."""
        return replace(self, draft_len=draft_len) if step.verifies_drafts else self
