"""The target's own words, by the engine that serves them: many prompts at once, kept in pieces, so that a run that was
stopped goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from trtspec.llm import LLM
from trtspec.sampling_params import SamplingParams
from trtspec.train.data import Tokens
from trtspec.train.report import Report

BATCH = 64
"""Prompts in one step."""
_PIECE = 2 * BATCH  # prompts


def regenerate(model: Path, prompts: Tensor, new_tokens: int, folder: Path) -> Tokens:
    """Greedy continuations of `prompts` [N, P], [N, P + new_tokens] in the smallest uint; ends of text are tokens like
    any other. What is done is kept in `folder`, of this model and these prompts alone, and not done again.

    Raises what LLM raises for the model.
    """
    count, length = prompts.shape
    folder.mkdir(parents=True, exist_ok=True)
    missing = [start for start in range(0, count, _PIECE) if not _piece(folder, start).is_file()]
    if missing:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        llm = LLM(model, max_batch_size=min(BATCH, count), max_seq_len=length + new_tokens, generation_config="off")
        with llm, Report("target's own words") as report:
            begin, made = time.monotonic(), 0
            for done, start in enumerate(missing, 1):
                some = prompts[start : start + _PIECE].tolist()
                outputs = llm.generate(some, params, use_tqdm=False)
                rows = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(some, outputs, strict=True)]
                save_ids(_piece(folder, start), np.asarray(rows, np.uint32))
                made += len(some) * new_tokens
                speed = made / (time.monotonic() - begin)
                report.at(done / len(missing), f"{made:,} tokens · {speed:,.0f} tok/s")
    whole = np.concatenate([np.load(_piece(folder, start)) for start in range(0, count, _PIECE)])
    return whole.astype(np.uint16) if int(whole.max()) < 2**16 else whole


def forget(folder: Path) -> None:
    """What `regenerate` kept there."""
    shutil.rmtree(folder, ignore_errors=True)


def save_ids(path: Path, ids: Tokens) -> None:
    """All of it or nothing."""
    partial = path.with_suffix(".tmp.npy")
    np.save(partial, ids)
    partial.replace(path)


def _piece(folder: Path, start: int) -> Path:
    return folder / f"{start:08d}.npy"
