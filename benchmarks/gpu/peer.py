"""transformers' generate() on the same checkpoint and card."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.card import Card


class Transformers:
    """A model in transformers.

    static: whether the cache has one fixed size. transformers then compiles the model first, which takes long.
    """

    def __init__(self, folder: Path, card: Card, static: bool) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the import
        import transformers

        self.card = card
        self.options = {"cache_implementation": "static"} if static else {}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(card.device)
        self.model.generation_config.eos_token_id = None  # generation goes on past it

    def tokens_per_second(self, prompts: Sequence[list[int]], count: int, repeats: int = 3) -> float:
        """Tokens per second over `count` tokens of each prompt after its first; the first of the repeats warms up."""
        ids = torch.tensor(prompts, device=self.card.device)  # [B, L]
        times = []
        for _ in range(1 + repeats):
            first, whole = self._seconds(ids, 1), self._seconds(ids, 1 + count)
            times.append(whole - first)
        return len(prompts) * count / statistics.median(times[1:])

    def _seconds(self, ids: torch.Tensor, count: int) -> float:
        self.card.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **self.options,
            )
        self.card.synchronize()
        return time.perf_counter() - start
