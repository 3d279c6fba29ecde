"""Quality of a pair of checkpoints on held-out files: perplexity, and the acceptance of the draft by the target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens, Windows
from trtspec.train.generate import greedy
from trtspec.train.language_model import LanguageModel


@torch.inference_mode()
def perplexity(decoder: Decoder, tokens: Tokens, seq_len: int, max_tokens: int) -> float:
    """Return exp of the mean loss per token over the first `max_tokens` of `tokens`.

    The loss is computed in windows of `seq_len` without overlap. A window's first tokens are predicted from little
    context, so longer windows give lower values.
    """
    model = LanguageModel(decoder).eval()
    count = min(max_tokens, len(tokens) - 1) // seq_len
    if count < 1:
        raise ConfigError(f"{len(tokens)} held-out tokens are less than one window of {seq_len}; use more data")
    total = 0.0
    for start in range(0, count * seq_len, seq_len):
        row = torch.from_numpy(tokens[start : start + seq_len + 1].astype(np.int64))
        logits = model(row[None, :-1])
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return math.exp(total / (count * seq_len))


@dataclass(frozen=True)
class Acceptance:
    """A draft's acceptance, measured over `steps` steps.

    length: mean tokens per step, the target's own included, 1 to K+1. per_position[j]: share of steps that keep more
    than j drafts.
    """

    length: float
    per_position: tuple[float, ...]
    steps: int


def held_out_prompts(tokens: Tokens, count: int, prompt_len: int, seed: int = 0) -> Tensor:
    """Return `count` prompts [count, prompt_len] int64, cut from anywhere in `tokens`."""
    rows, _ = Windows(tokens, prompt_len, count, seed).batch(0)
    return rows


@torch.inference_mode()
def greedy_acceptance(
    target: Decoder, draft: Decoder, prompts: Tensor, new_tokens: int, num_draft_tokens: int = 3
) -> Acceptance:
    """Return the acceptance of chained greedy drafts along the target's greedy continuation of `prompts` [B, P].

    No engine runs. While the draft is right, its own drafts are the target's text. Once it is wrong, the rest of the
    chain is rejected. So one pass of the draft over the target's text shows where every chain would break.
    """
    text = greedy(target, prompts, new_tokens)
    batch, length = text.shape
    guesses = LanguageModel(draft).eval()(text[:, :-1]).argmax(-1).view(batch, length - 1)
    right = (guesses == text[:, 1:])[:, prompts.shape[1] - 1 :].tolist()  # [B, new_tokens]
    accepted: list[int] = []
    for row in right:
        # prefill gives token 0; each later step verifies K drafts and adds the target's token
        place = 1
        while place + num_draft_tokens < new_tokens:
            run = row[place : place + num_draft_tokens]
            kept = run.index(False) if False in run else num_draft_tokens
            accepted.append(kept)
            place += kept + 1
    if not accepted:
        raise ConfigError(f"new_tokens={new_tokens} is too short to check {num_draft_tokens} draft tokens; raise it")
    counts = np.asarray(accepted)
    per_position = tuple(float((counts > j).mean()) for j in range(num_draft_tokens))
    return Acceptance(float(counts.mean()) + 1.0, per_position, len(accepted))
