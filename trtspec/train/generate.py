"""Greedy continuation of many equally long prompts at once, with a plain KV cache, for training data and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.language_model import heads_first
from trtspec.train.report import Report


class CachedAttend:
    """A KV cache with its attention: the newest rows of `batch` sequences attend to all their rows so far."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        spec = decoder.spec
        shape = (spec.num_layers, batch, spec.num_kv_heads, capacity, spec.head_dim)
        dtype = next(decoder.parameters()).dtype
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.batch, self.length = batch, 0  # rows that all layers hold

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = q.shape[0] // self.batch
        end = self.length + new
        self.keys[layer, :, :, self.length : end] = heads_first(k, self.batch)
        self.values[layer, :, :, self.length : end] = heads_first(v, self.batch)
        out = F.scaled_dot_product_attention(
            heads_first(q, self.batch),
            self.keys[layer, :, :, :end],
            self.values[layer, :, :, :end],
            is_causal=new > 1,  # several rows only in prefill, when the cache is empty
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(q.shape)


@torch.inference_mode()
def greedy(
    decoder: Decoder, prompts: Tensor, new_tokens: int, step: Callable[[int], None] = lambda made: None
) -> Tensor:
    """Return prompts [B, P] with their greedy continuations, [B, P + new_tokens].

    END_OF_TEXT is a token like any other here. step: called with the number of new tokens that each prompt has so far.
    """
    batch, length = prompts.shape
    attend = CachedAttend(decoder, batch, length + new_tokens)
    rows, ids = prompts, [prompts]
    for made in range(1, new_tokens + 1):
        positions = torch.arange(attend.length, attend.length + rows.shape[1]).repeat(batch)
        hidden = decoder(rows.reshape(-1), positions, attend)
        attend.length += rows.shape[1]
        last = hidden.view(batch, rows.shape[1], -1)[:, -1]
        rows = decoder.logits(last).argmax(-1, keepdim=True)
        ids.append(rows)
        step(made)
    return torch.cat(ids, dim=1)


def continue_windows(decoder: Decoder, prompts: Tensor, new_tokens: int, batch: int = 128) -> Tokens:
    """Return greedy continuations of all `prompts` [N, P], one after another: [N * (P + new_tokens)].

    The dtype is uint16 if all ids of the vocabulary fit, else uint32.
    """
    rows, total, begin = [], len(prompts) * new_tokens, time.monotonic()
    with Report("target's own words") as report:

        def say(start: int, count: int, made: int) -> None:
            words = start * new_tokens + count * made
            report.at(words / total, f"{words:,} tokens · {words / (time.monotonic() - begin):,.0f} tok/s")

        for start in range(0, len(prompts), batch):
            some = prompts[start : start + batch]
            rows.append(greedy(decoder, some, new_tokens, partial(say, start, len(some))))
    return torch.cat(rows).reshape(-1).numpy().astype(np.uint16 if decoder.spec.vocab_size <= 2**16 else np.uint32)
