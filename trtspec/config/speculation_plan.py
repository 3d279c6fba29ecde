"""The values around resolution: what goes in, what comes out, and the draft length of each step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.modes import SpeculativeDecodingMode


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What resolution needs to know of the target and the engine. Lengths in tokens, sizes in requests."""

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
    """What resolution needs to know of a draft checkpoint, and what its room found in its config.json.

    vocab_size, max_model_len: None = as the target's, as of a head that has none of its own. n_predict: layers or heads
    that draft one token each. checkpoint: a ModelConfig where it is described like a decoder.
    """

    method: str  # that it is for
    vocab_size: int | None = None
    max_model_len: int | None = None
    n_predict: int | None = None
    capture_layers: tuple[int, ...] | None = None  # "after layer i", where the checkpoint says
    mask_token_id: int | None = None  # for parallel drafting, where the checkpoint says
    checkpoint: CheckpointConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationPlan:
    """Speculation with every question answered. Frozen; the config it came from is unchanged."""

    mode: SpeculativeDecodingMode
    method: str
    num_speculative_tokens: int  # K
    model: str | None  # draft checkpoint; the target's for its own MTP layers
    max_model_len: int  # drafts end before it; a model drafts nothing for a request whose length + K exceeds it
    quantization: str | None
    enforce_eager: bool | None  # True: without CUDA graphs
    disable_logprobs: bool  # requests that ask for logprobs are refused
    draft_tensor_parallel_size: int
    speculative_token_tree: tuple[tuple[int, ...], ...]  # paths; a chain of K
    draft_sample_method: str | None  # None: drawn with the target's noise; "greedy": arg-max
    capture_layers: tuple[int, ...]  # "after layer i"; empty where nothing is captured
    mask_token_id: int | None  # of parallel drafting; None also where nothing is known of the draft
    options: Any  # what the method alone takes: a methods.options.MethodOptions of its room
    # inputs of draft_len_for_batch
    disable_by_batch_size: int | None
    draft_len_schedule: tuple[tuple[int, int], ...] | None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None
    max_concurrency: int | None
    max_batch_size: int
    max_num_tokens: int | None

    @property
    def num_lookahead_slots(self) -> int:
        """KV rows a step may write beyond the last accepted token: K."""
        return self.num_speculative_tokens

    @property
    def num_extra_kv_tokens(self) -> int:
        """KV rows the draft passes after the first may write beyond those."""
        return max(self.num_speculative_tokens - 1, 0)


def draft_len_for_batch(spec_plan: SpeculationPlan, num_requests: int) -> int:
    """Draft tokens per request, 0..K, in a step of `num_requests` requests. Pure; the strictest gate set counts."""
    k = spec_plan.num_speculative_tokens
    if spec_plan.max_concurrency is not None:
        rows = spec_plan.max_num_tokens
        fitting = spec_plan.max_batch_size if rows is None else min(spec_plan.max_batch_size, rows // (1 + k))
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
    """What the gates that depend on nothing but the number of requests leave of K."""
    limits = [k]
    if disable_by_batch_size is not None and num_requests > disable_by_batch_size:
        limits.append(0)
    if schedule is not None:  # keys are upper bounds: the smallest key >= batch; 0 past the last
        at = bisect.bisect_left([key for key, _ in schedule], num_requests)
        limits.append(schedule[at][1] if at < len(schedule) else 0)
    if ranges is not None:  # gaps and the tail carry the previous K
        at = bisect.bisect_right([start for start, _, _ in ranges], max(num_requests, 1)) - 1
        limits.append(ranges[at][2])
    return min(limits)


def scheduled_draft_lens(spec_plan: SpeculationPlan) -> set[int]:
    """Every draft length that a batch of some size can get: K, those of a schedule, 0 where a gate can close."""
    K = spec_plan.num_speculative_tokens
    lengths = {K}
    lengths |= {length for _, length in spec_plan.draft_len_schedule or ()}
    lengths |= {length for _, _, length in spec_plan.num_speculative_tokens_per_batch_size or ()}
    if spec_plan.disable_by_batch_size is not None or spec_plan.max_concurrency is not None or len(lengths) > 1:
        lengths.add(0)
    return {length for length in lengths if length <= K}
