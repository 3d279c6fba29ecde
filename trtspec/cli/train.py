"""`trtspec train`: a target and data in, a draft head out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtspec.errors import ConfigError, DependencyError
from trtspec.train.head import HeadOptions
from trtspec.train.plot import plot_metrics
from trtspec.train.run import KINDS as KINDS
from trtspec.train.run import train_head

OPTIONS: dict[str, tuple[type, str]] = {
    "draft_vocab_size": (int, "token ids the head can say, the most frequent ones (default: all)"),
    "intermediate_size": (int, "width of the head's MLP (default: the target's)"),
    "num_layers": (int, "residual blocks of each head"),
    "inner_size": (int, "width of the state (default: the target's hidden size)"),
    "modules": (int, "1, which makes all drafts, or as many as --unroll, one for each"),
    "own_words": (int, "prompts from the data that the target continues greedily: half of the lessons; 0: none"),
    "own_words_len": (int, "tokens of each such continuation"),
    "unroll": (int, "passes per lesson: the drafts per step it is made for, and Medusa's heads or an MLP's stages"),
    "seq_len": (int, "tokens per window of the data"),
    "batch_size": (int, "windows per optimizer step"),
    "learning_rate": (float, "of the optimizers, after warm-up and before decay"),
    "seed": (int, "of the weights and of the order of the data"),
    "dtype": (str, "of the arithmetic; weights are kept in float32"),
    "checkpoint_seconds": (float, "a kill costs at most the training of so long"),
}
"""Field of the options, of those that are a word or a number -> its type, and what it is. A kind has some of them."""


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Everything that the options of this kind hold, by the same names."""
    fields = {field.name: field.default for field in dataclasses.fields(KINDS[kind])}
    parser.set_defaults(run=run, kind=kind)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint folder of the target")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files, folders of them, or .npy files of token ids; or .safetensors shards of the target's hidden "
        "states, or folders of them (see method extract_hidden_states)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for what is made, in its public layout"
    )
    parser.add_argument(
        "--run",
        dest="run_folder",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints, metrics.jsonl, metrics.png and evaluation.json; the same command goes on from "
        "what is there (default: OUT.run, beside OUT)",
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for so long")
    length.add_argument("--steps", type=int, help="train for so many optimizer steps")
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="PATH",
        help="text or ids on which the trained head's acceptance length is simulated",
    )
    if "capture_layers" in fields:
        parser.add_argument(
            "--capture-layers",
            metavar="I,J,...",
            help='layers of the target whose output the head reads, "after layer i" (default: EAGLE3\'s three)',
        )
    for name, (word, text) in OPTIONS.items():
        if name in fields:
            text += f" (default: {fields[name]})" if fields[name] is not None else ""
            parser.add_argument(f"--{name.replace('_', '-')}", type=word, help=text)
    if "tie_weights" in fields:
        parser.add_argument("--tie-weights", action="store_true", help="stages share what they can")
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="no torch.compile, which takes minutes before the first step: for short runs",
    )


def run(namespace: argparse.Namespace) -> int:
    """Train, draw the curve, say how to use the head. Ctrl-C saves and says how to go on."""
    options = options_of(namespace)
    console = Console(stderr=True)
    try:
        trainer = train_head(options)
    except KeyboardInterrupt:
        draw(options.run)
        print(f"trtspec: stopped; what was trained is kept in {options.run}, the same command goes on from there",
              file=sys.stderr)  # fmt: skip
        return 130
    draw(options.run)
    table = Table(show_header=False, box=None)
    table.add_row("steps", f"{trainer.step}, {trainer.seconds:.0f} s, {trainer.tokens / 1e6:.2f} M tokens")
    table.add_row("loss", f"{trainer.loss:.3f}")
    if options.held_out is not None:
        found = json.loads((options.run / "evaluation.json").read_text(encoding="utf-8"))
        table.add_row(
            "acceptance length, held out", f"{found['acceptance_length']:.2f} with {found['num_draft_tokens']} drafts"
        )
    table.add_row("head", str(options.out))
    console.print(table)
    print(f"use it with: trtspec generate {options.usage} --prompt ...", file=sys.stderr)
    return 0


def options_of(namespace: argparse.Namespace) -> HeadOptions:
    """The options given; the rest have their defaults."""
    kind = KINDS[namespace.kind]
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    given["data"] = tuple(namespace.data)
    given["run"] = namespace.run_folder or namespace.out.with_name(namespace.out.name + ".run")
    if "capture_layers" in given:
        given["capture_layers"] = _layers(given["capture_layers"])
    return kind(**given)


def draw(run: Path) -> None:
    """metrics.png of a run, where there is something to draw and something to draw with."""
    try:
        if (run / "metrics.jsonl").is_file():
            plot_metrics(run / "metrics.jsonl", run / "metrics.png")
    except DependencyError as error:
        print(f"trtspec: no metrics.png: {error}", file=sys.stderr)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--capture-layers {text!r}: use layer numbers separated by commas, like 1,4,6") from error
