"""Notes that belong to the figures: how they came about, what they leave out, and where they come from."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.checkpoints import CIRCLE
from benchmarks.peers.contests import NGRAM
from benchmarks.peers.environments import openmp

ROOT = Path(__file__).resolve().parents[2]

ALWAYS = (
    "driving: token ids in and out, no tokenizer, no text, no server; one thread hands over a batch and waits for it. "
    "It calls step() of trtspec's and of vLLM's engine, llama_decode and an arg-max, transformers' generate(). What "
    "trtspec's LLM puts around that, an engine thread and text, is not in the figures; nor is what vLLM's LLM does.",
    "trtspec / it: tokens/s of trtspec's compiled engine of the same format over the contestant's, so above 1 trtspec "
    "is faster; the median of the ratios repeat by repeat.",
    "weights/step: what a step without drafts reads of the weights as the contestant keeps them, scales included, of "
    "a separate embedding but a row. Contestants of one format do not keep the same bytes: trtspec's int8 and int4 "
    "leave the lm_head in bf16, llama.cpp's Q8_0 and Q4_0 quantise it too (Q4_0 as Q6_K), and scales differ. `trtspec "
    "/ it` is not corrected for that; `of probe` is.",
    "of probe: bytes of weights per second over the read bandwidth, the mean of a probe right before and one right "
    "after the turn; median (smallest .. largest) over the repeats. It may exceed 100% where weights stay in the "
    "CPU's caches, as the demo's do.",
    "constructor to first token: one start each, imports before it. trtspec starts from an engine folder: what "
    "compiling costs, once, in `trtspec build`, is not in it. vLLM's has in it whatever vLLM compiles as it starts; "
    "it finds some of what an earlier run compiled in WORK/vllm-cache. trtspec eager and transformers start from the "
    "checkpoint, llama.cpp from a GGUF file that was converted before. Peak memory: of all processes, with mapped "
    "files, over the contests of that start; vLLM's has 1 GiB of KV cache.",
)
VLLM = (
    "vLLM: its default, in which the engine's core and its worker are processes of their own and every step is sent "
    "to and fro. vLLM in-process: VLLM_ENABLE_V1_MULTIPROCESSING=0, both in the caller's process, as trtspec is "
    "driven here. Threads are bound to the CPUs in both. "
)
RANDOM = (
    f"40M and 246M have random weights that count in circles of {CIRCLE} tokens, so every engine writes the same text "
    "and lookup proposes the same drafts: acceptance is equal by construction (column `tokens per step`), not forced. "
    "There is no trained draft for them: draft model and EAGLE3 run on the demo models only."
)
WHAT = {
    "ngram": (
        f"n-gram lookup: K={NGRAM['num_speculative_tokens']}, n-grams of {NGRAM['prompt_lookup_min']} to "
        f"{NGRAM['prompt_lookup_max']} tokens. transformers and llama-cpp-python have no lower limit (they look up "
        "single tokens too) and look up for one sequence only."
    ),
    "draft": "transformers' assisted generation takes one sequence only.",
}


def notes(models: Collection[str], what: Collection[str], pythons: Mapping[str, str]) -> list[str]:
    """All notes on a run of these models and contests. pythons: Python program of each contestant."""
    found = [*ALWAYS]
    if "vllm" in pythons:
        intel, _ = openmp(pythons["vllm"])
        found.append(VLLM + (f"Intel's OpenMP ({intel.name}) is preloaded." if intel else "Torch's OpenMP serves."))
    if set(models) - {"demo"}:
        found.append(RANDOM)
    return found + [WHAT[one] for one in WHAT if one in what]


def origin(script: str, arguments: Sequence[str]) -> dict[str, str]:
    """Origin of the figures: the commit, if this is a git checkout, and the command line."""
    return {"commit": _commit(), "command": shlex.join(["python", script, *arguments])}


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "none"  # a copy inside another repository
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"
