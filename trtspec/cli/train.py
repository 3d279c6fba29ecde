"""`trtspec train eagle3`: a target and data in, a draft head out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtspec.errors import ConfigError, DependencyError
from trtspec.train.eagle3_run import Eagle3Options, train_eagle3
from trtspec.train.plot import plot_metrics

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Eagle3Options)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that Eagle3Options holds, by the same names."""

    def option(name: str, kind: type, text: str, metavar: str | None = None) -> None:
        default = _DEFAULTS[name.replace("-", "_")]
        text += f" (default: {default})" if default is not None else ""
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)

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
        "--out", type=Path, required=True, metavar="DIR", help="folder for the head, in the public EAGLE3 layout"
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
    option("held-out", Path, "text or ids on which the trained head's acceptance length is simulated", "PATH")

    parser.add_argument(
        "--capture-layers",
        metavar="I,J,...",
        help='layers of the target whose output the head reads, "after layer i" (default: EAGLE3\'s three)',
    )
    option("draft-vocab-size", int, "token ids the head can say, the most frequent ones (default: all)")
    option("intermediate-size", int, "width of the head's MLP (default: the target's)")
    option("own-words", int, "prompts from the data that the target continues greedily: half of the lessons; 0: none")
    option("own-words-len", int, "tokens of each such continuation")
    option("unroll", int, "passes of the head per lesson: the drafts per step it is made for")
    option("seq-len", int, "tokens per window of the data")
    option("batch-size", int, "windows per optimizer step")
    option("learning-rate", float, "of the optimizers, after warm-up and before decay")
    option("seed", int, "of the weights and of the order of the data")
    option("dtype", str, "of the arithmetic; weights are kept in float32")
    option("checkpoint-seconds", float, "a kill costs at most the training of so long")
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
        trainer = train_eagle3(options)
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
    use = f"--model {options.target} --spec-method eagle3 --spec-model {options.out} --spec-tokens {options.unroll}"
    print(f"use it with: trtspec generate {use} --prompt ...", file=sys.stderr)
    return 0


def options_of(namespace: argparse.Namespace) -> Eagle3Options:
    """The options given; the rest have Eagle3Options' defaults."""
    given = {name: value for name, value in vars(namespace).items() if name in _DEFAULTS and value is not None}
    given["data"] = tuple(namespace.data)
    given["run"] = namespace.run_folder or namespace.out.with_name(namespace.out.name + ".run")
    if namespace.capture_layers is not None:
        given["capture_layers"] = _layers(namespace.capture_layers)
    return Eagle3Options(**given)


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
