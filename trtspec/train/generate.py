"""Greedy continuation of many equally long prompts at once, with a plain KV cache: training data and evaluation."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from trtspec.models.decoder import Decoder
from trtspec.train.data import Tokens
from trtspec.train.language_model import heads_first


class CachedAttend:
    """Attention of the newest rows of `batch` sequences over all their rows so far, kept here."""

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
            is_causal=new > 1,  # several rows at once only as a prompt, where the cache is empty
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(q.shape)


@torch.inference_mode()
def greedy(decoder: Decoder, prompts: Tensor, new_tokens: int) -> Tensor:
    """prompts [B, P] -> [B, P + new_tokens]; END_OF_TEXT is a token like any other here."""
    batch, length = prompts.shape
    attend = CachedAttend(decoder, batch, length + new_tokens)
    rows, ids = prompts, [prompts]
    for _ in range(new_tokens):
        positions = torch.arange(attend.length, attend.length + rows.shape[1]).repeat(batch)
        hidden = decoder(rows.reshape(-1), positions, attend)
        attend.length += rows.shape[1]
        last = hidden.view(batch, rows.shape[1], -1)[:, -1]
        rows = decoder.logits(last).argmax(-1, keepdim=True)
        ids.append(rows)
    return torch.cat(ids, dim=1)


def continue_windows(decoder: Decoder, prompts: Tensor, new_tokens: int, batch: int = 128) -> Tokens:
    """Greedy continuations of all `prompts` [N, P], one after another: [N * (P + new_tokens)], the smallest uint."""
    starts = range(0, len(prompts), batch)
    rows = [
        greedy(decoder, prompts[start : start + batch], new_tokens)
        for start in track(starts, description="target's own words")
    ]
    return torch.cat(rows).reshape(-1).numpy().astype(np.uint16 if decoder.spec.vocab_size <= 2**16 else np.uint32)
