"""Strict acceptance: a draft is kept exactly if the target drew the same token. The default of every mode."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

from trtspec.core import SpecMetadata, StepOutputs, Verdict
from trtspec.ops import spec_accept

FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
logger = logging.getLogger(__name__)


def accept(outputs: StepOutputs, spec: SpecMetadata) -> Verdict:
    """Return the leading drafts that equal the target's own draws, plus the draw after them."""
    if outputs.tokens.shape[0] != spec.batch_size * (spec.runtime_draft_len + 1) or spec.num_contexts:
        emits = spec.next_prompt_token < 0
        sampled, drafts = spec.per_request(outputs.tokens), spec.drafts_per_request()
    else:  # generations with K drafts each
        sampled, drafts = outputs.tokens.view(spec.batch_size, -1), spec.draft_tokens
        if spec.runtime_draft_len == 0:
            return Verdict(sampled, _ones(spec.batch_size, torch.int64, sampled.device))
        emits = _ones(spec.batch_size, torch.bool, sampled.device)
    tokens, num_tokens = spec_accept(sampled, drafts, spec.draft_lens, spec.forced_accept, emits)
    return Verdict(tokens, num_tokens)


@functools.lru_cache(maxsize=64)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ones, [count]. All steps share it: read only."""
    return torch.ones(count, dtype=dtype, device=device)


def get_force_num_accepted_tokens() -> int:
    """Number of drafts per generation step that count as accepted, from the environment; 0 = off.

    Junk is off too, with a warning. Lossy: the output is not the target's. For benchmarks and debugging.
    """
    text = os.environ.get(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "0")
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        logger.warning("%s=%r is not a number >= 0; ignored", FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, text)
        return 0
    return value
