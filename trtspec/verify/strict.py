"""Strict acceptance: a draft is kept exactly if the target drew the same token. The default of every mode."""

from __future__ import annotations

import logging
import os

import torch

from trtspec.core import SpecMetadata, StepOutputs, Verdict
from trtspec.ops import spec_accept

FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
logger = logging.getLogger(__name__)


def accept(outputs: StepOutputs, spec: SpecMetadata) -> Verdict:
    """The leading run of drafts that equal the target's own draws, plus the draw after it."""
    emits = spec.next_prompt_token < 0
    if spec.runtime_draft_len == 0:  # nothing to compare, one logits row for each request
        return Verdict(torch.where(emits, outputs.tokens, -1)[:, None], emits.long())
    tokens, num_tokens = spec_accept(
        spec.per_request(outputs.tokens), spec.drafts_per_request(), spec.draft_lens, spec.forced_accept, emits
    )
    return Verdict(tokens, num_tokens)


def get_force_num_accepted_tokens() -> int:
    """Drafts to count as accepted per generation step, from the environment; 0 = off, as is (with a warning) junk.

    Lossy: the output is not the target's. For benchmarks and debugging.
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
