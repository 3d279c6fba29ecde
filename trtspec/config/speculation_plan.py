"""Inputs and result of planning a speculation, and the draft length of each step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.tree import DraftTree, DynamicTree, Tree, chain
from trtspec.modes import SpeculativeDecodingMode


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The facts of the target and the engine that planning needs. Lengths are in tokens, max_batch_size in requests."""

    model: str
    model_type: str
    vocab_size: int
    max_model_len: int
    num_hidden_layers: int
    max_batch_size: int
    max_num_tokens: int | None = None  # rows per step; None: no limit beyond max_batch_size
    tensor_parallel_size: int = 1
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """The facts of a draft checkpoint that planning needs, and what the method's reader found in its config.json.

    vocab_size, max_model_len: None = the target's, as for a head that has none of its own. n_predict: number of
    layers or heads that draft one token each; for DFlash and DSpark, the most drafts of a block. checkpoint: a
    ModelConfig if it is described like a decoder.
    """

    method: str  # method that the checkpoint is for
    vocab_size: int | None = None
    max_model_len: int | None = None
    n_predict: int | None = None
    capture_layers: tuple[int, ...] | None = None  # "after layer i", if the checkpoint says
    mask_token_id: int | None = None  # for parallel drafting, if the checkpoint says
    checkpoint: CheckpointConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationPlan:
    """A speculation with every setting resolved. It is frozen; the config that it was made from is unchanged."""

    mode: SpeculativeDecodingMode
    method: str
    num_speculative_tokens: int  # K; the depth of a tree
    chooses_draft_len: bool  # a step makes and verifies 0..K drafts, as many as save time (engine/draft_length.py)
    model: str | None  # draft checkpoint; the target's if its own MTP layers draft
    max_model_len: int  # drafts end before it; a model drafts nothing for a request whose length + K exceeds it
    quantization: str | None
    enforce_eager: bool | None  # True: without CUDA graphs
    disable_logprobs: bool  # True: requests that ask for logprobs are refused
    draft_tensor_parallel_size: int
    speculative_token_tree: tuple[tuple[int, ...], ...]  # paths; those of a chain of K if none was given
    dynamic_tree: DynamicTree | None = None  # limits of trees that each step shapes; None: the shape is fixed
    sa_threshold: int | None = None  # shortest match, in tokens, whose drafts replace the method's own; None: none do
    draft_sample_method: str | None  # None: drawn with the target's noise; "greedy": arg-max
    draft_confidence_threshold: float | None  # drafts less likely to be accepted are not verified; None: all are
    capture_layers: tuple[int, ...]  # "after layer i"; empty if nothing is captured
    mask_token_id: int | None  # for parallel drafting; None also if nothing is known of the draft
    options: Any  # settings of the method alone: a subclass of methods.options.MethodOptions
    # inputs of draft_len_for_batch
    disable_by_batch_size: int | None
    draft_len_schedule: tuple[tuple[int, int], ...] | None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None
    max_concurrency: int | None
    max_batch_size: int
    max_num_tokens: int | None

    @cached_property
    def tree(self) -> Tree | None:
        """The tree of a step's drafts; None = a chain."""
        if self.dynamic_tree is not None:
            return self.dynamic_tree
        is_chain = self.speculative_token_tree == chain(self.num_speculative_tokens)
        return None if is_chain else DraftTree(self.speculative_token_tree)

    @cached_property
    def max_total_draft_tokens(self) -> int:
        """Largest number of drafts that a step verifies of a request: K, or the nodes N of a tree."""
        return self.num_drafts_within(self.num_speculative_tokens)

    def num_drafts_within(self, depth: int) -> int:
        """Number of drafts that are at most `depth` tokens ahead."""
        return depth if self.tree is None else self.tree.within(depth)

    @property
    def shapes_graphs(self) -> bool:
        """Whether what is compiled differs from plain decoding."""
        return self.mode.shapes_graphs() or self.tree is not None

    @property
    def rows_ahead(self) -> int:
        """Number of KV rows that drafting writes, or sees, after the rows of a step."""
        ahead = self.mode.rows_ahead(self.num_speculative_tokens)
        if self.dynamic_tree is not None and not self.dynamic_tree.top_k:
            return max(ahead, self.dynamic_tree.num_nodes)  # a step without drafts may be followed by a whole tree
        return ahead if self.tree is None else max(ahead, self._tree_rows + 1)

    @property
    def branch_rows(self) -> int:
        """Number of rows past a request's length limit that a step may have, as branches have rows of their own.

        A step whose drafts are at most d tokens ahead starts d tokens before the limit or earlier. It may have more
        nodes.
        """
        return 0 if self.tree is None else self.tree.branch_rows

    @property
    def _tree_rows(self) -> int:
        """Number of draft KV rows of a tree: those of the nodes that draft passes run."""
        return 0 if self.tree is None or self.mode.drafts_without_kv() else self.tree.draft_rows

    @property
    def num_lookahead_slots(self) -> int:
        """Number of KV rows that a step may write after the last accepted token: K, or N."""
        return self.max_total_draft_tokens

    @property
    def num_extra_kv_tokens(self) -> int:
        """Number of KV rows that may be written after the num_lookahead_slots rows: K - 1 for a chain.

        For a tree it is branch_rows or P, whichever is more. P is the number of nodes that draft passes run: those with
        children.
        """
        if self.tree is None:
            return max(self.num_speculative_tokens - 1, 0)
        return max(self.branch_rows, self._tree_rows)


def draft_len_for_batch(spec_plan: SpeculationPlan, num_requests: int) -> int:
    """Depth of the drafts of each request, 0..K, in a step of `num_requests` requests. For a chain it is their number.

    If several limits are set, the smallest counts.
    """
    k = spec_plan.num_speculative_tokens
    if spec_plan.max_concurrency is not None:
        rows = spec_plan.max_num_tokens
        fitting = (
            spec_plan.max_batch_size
            if rows is None
            else min(spec_plan.max_batch_size, rows // (1 + spec_plan.max_total_draft_tokens))
        )
        if min(num_requests, fitting) > spec_plan.max_concurrency:
            return 0
    return scheduled_draft_len(
        k,
        num_requests,
        spec_plan.disable_by_batch_size,
        spec_plan.draft_len_schedule,
        spec_plan.num_speculative_tokens_per_batch_size,
    )


def scheduled_draft_len(
    k: int,
    num_requests: int,
    disable_by_batch_size: int | None,
    schedule: tuple[tuple[int, int], ...] | None,
    ranges: tuple[tuple[int, int, int], ...] | None,
) -> int:
    """The smallest of K and the limits that depend only on the number of requests."""
    limits = [k]
    if disable_by_batch_size is not None and num_requests > disable_by_batch_size:
        limits.append(0)
    if schedule is not None:  # keys are upper bounds: the smallest key >= batch; 0 after the last
        at = bisect.bisect_left([key for key, _ in schedule], num_requests)
        limits.append(schedule[at][1] if at < len(schedule) else 0)
    if ranges is not None:  # the previous K holds in gaps and after the last
        at = bisect.bisect_right([start for start, _, _ in ranges], max(num_requests, 1)) - 1
        limits.append(ranges[at][2])
    return min(limits)


def scheduled_draft_lens(spec_plan: SpeculationPlan) -> set[int]:
    """Every number of drafts for which graphs are made: K, those of the schedules, 1 and 3 if the engine chooses.

    0 is added if a limit on the number of requests is set, or if there are several numbers.
    """
    K = spec_plan.num_speculative_tokens
    lengths, schedule = {K}, spec_plan.draft_len_schedule or ()
    lengths |= {length for _, length in schedule}
    if schedule and schedule[-1][0] < spec_plan.max_batch_size:
        lengths.add(0)
    lengths |= {length for _, _, length in spec_plan.num_speculative_tokens_per_batch_size or ()}
    if spec_plan.chooses_draft_len:
        lengths |= {1, 3}
    if spec_plan.disable_by_batch_size is not None or spec_plan.max_concurrency is not None or len(lengths) > 1:
        lengths.add(0)
    return {spec_plan.num_drafts_within(length) for length in lengths if length <= K}
