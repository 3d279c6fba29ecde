"""MODEL_CARD.md of a trained pair, written from measurements alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trtspec.train.evaluate import Acceptance


@dataclass(frozen=True)
class ModelSummary:
    """A checkpoint's figures. `loss` is the training loss (nats per token), averaged over about the last 20 steps."""

    layers: int
    hidden: int
    parameters: int
    megabytes: float
    steps: int
    tokens: int
    minutes: float
    loss: float
    perplexity: dict[int, float]  # window length in tokens -> held-out perplexity


@dataclass(frozen=True)
class CardContents:
    """A record of everything that a card states."""

    data: dict[str, int | str]
    target: ModelSummary
    draft: ModelSummary
    acceptance: Acceptance
    prompts: tuple[int, int, int]  # number of prompts, tokens and new tokens of each
    command: str
    torch_version: str
    stage: str

    def as_json(self) -> dict[str, Any]:
        """Return plain data for evaluation.json."""
        return asdict(self)


def model_card(facts: CardContents) -> str:
    """Return the card as Markdown."""
    data, acceptance = facts.data, facts.acceptance
    pair = (facts.target, facts.draft)

    def row(name: str, values: list[str]) -> str:
        return f"| {name} | {' | '.join(values)} |"

    def part(name: str, key: str) -> str:
        files, characters, tokens = (f"{data[f'{key}_{unit}']:,}" for unit in ("files", "characters", "tokens"))
        return f"- {name}: {files} files, {characters} characters, {tokens} tokens"

    windows = sorted(facts.target.perplexity)
    table = [
        row("", ["target", "draft"]),
        "|---|---|---|",
        row("layers x hidden size", [f"{m.layers} x {m.hidden}" for m in pair]),
        row("parameters (tied head counted once)", [f"{m.parameters:,}" for m in pair]),
        row("model.safetensors (bf16)", [f"{m.megabytes:.1f} MB" for m in pair]),
        row("optimizer steps", [f"{m.steps:,}" for m in pair]),
        row("tokens seen", [f"{m.tokens:,}" for m in pair]),
        row("training time", [f"{m.minutes:.0f} min" for m in pair]),
        row("training loss at the end (nats/token)", [f"{m.loss:.3f}" for m in pair]),
        *(row(f"held-out perplexity, windows of {w}", [f"{m.perplexity[w]:.2f}" for m in pair]) for w in windows),
    ]
    positions = [f"{value:.1%}" for value in acceptance.per_position]
    count, length, new = facts.prompts
    return f"""---
license: psf-2.0
tags: [speculative-decoding, llama, python]
---
# Demo pair: a small target and its draft

Two Llama-shaped models that complete Python, made to show speculative decoding on a laptop: `target/`, and the 1-layer
`draft/` that guesses its next tokens. Both load unchanged in transformers, vLLM and trtspec. They are demonstration
objects: too small and too briefly trained to write code anyone should run.

This is the {facts.stage} checkpoint of the run.

## Data and licence

The source of Python {data["python"]}'s standard library (tests included), found through `sysconfig` and licensed under
the PSF License Version 2; the weights are shipped under the same licence. Left out: generated tables (`encodings`,
`pydoc_data`), files over 512 KiB, files that are not UTF-8, duplicates. A tenth of the files, chosen by the hash of
their relative path, is held out, seen by neither the models nor the tokenizer:

{part("training", "train")}
{part("held out", "held_out")}

Tokenizer: byte-level BPE, {data["vocab_size"]:,} tokens, shared by both models; `<|endoftext|>` (id 0) is BOS and EOS.

## Training and measurements

{chr(10).join(table)}

The target learns next tokens, mostly in windows of 256, then 512, at last 2048. The draft learns the target: half its
arg-max, half its distribution, on training files and, in the final stage, on the target's own greedy continuations of
them; its training loss is therefore not comparable to the target's. Matrices are trained by Muon, embeddings and norms
by AdamW, in bf16 over fp32 weights, on a CPU.

**Acceptance length {acceptance.length:.2f}** (tokens per step, the target's own included) at K={len(positions)},
greedy. Steps that keep at least 1, 2, ... drafts: {", ".join(positions)}. Measured on {count} held-out prompts of
{length} tokens, {new} new tokens each, {acceptance.steps:,} steps.

## Rebuild

    {facts.command}

Made with torch {facts.torch_version}. The command may be interrupted and repeated: it goes on where it was. With
`--minutes` the number of steps depends on the machine, and so do the weights.
"""
