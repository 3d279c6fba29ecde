"""`trtspec train`: takes a target and data, and writes a draft head."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtspec.cli.options import add_model
from trtspec.errors import ConfigError, DependencyError
from trtspec.hub.folders import checkpoint_folder
from trtspec.train.head import HeadOptions
from trtspec.train.plot import plot_metrics
from trtspec.train.run import KINDS as KINDS
from trtspec.train.run import train_head


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add arguments for all options of this kind, by the same names."""
    parser.set_defaults(run=run, kind=kind)
    add_model(parser, "--target", "of the target: checkpoint folder, GGUF file or name on the Hub")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files, folders of them, or .npy files of token ids; or .jsonl files of conversations, of which the "
        'answers are taught ({"messages": [{"role": ..., "content": ...}, ...]}); or .safetensors shards of the '
        "target's hidden states, or folders of them (see method extract_hidden_states)",
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
        "what is there (default: OUT.run, next to OUT)",
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for so long")
    length.add_argument("--steps", type=int, help="train for so many optimizer steps")
    if KINDS[kind].simulated:
        parser.add_argument(
            "--held-out",
            type=Path,
            metavar="PATH",
            help="text, ids or conversations on which the head's acceptance length is simulated, along the "
            "training and at its end",
        )
    hints = typing.get_type_hints(KINDS[kind])
    for field in dataclasses.fields(KINDS[kind]):
        if "help" in field.metadata:
            _add_setting(parser, field, hints[field.name])


def _add_setting(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add the argument of a train.head.setting, by its name and type."""
    name, text = field.name.replace("_", "-"), field.metadata["help"]
    (kind,) = {*(typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,))} - {type(None)}
    if kind is bool:
        action = "store_false" if field.default else "store_true"
        parser.add_argument(f"--no-{name}" if field.default else f"--{name}", dest=field.name, action=action, help=text)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(f"--{name}", metavar="I,J,...", help=text)
    else:
        text += f" (default: {field.default})" if field.default is not None else ""
        parser.add_argument(f"--{name}", type=kind, help=text)


def run(namespace: argparse.Namespace) -> int:
    """Train, draw the curve, and print how to use the head. Ctrl-C saves, and prints how to continue."""
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
    usage = options.usage.replace(str(options.target), namespace.target)  # with a GGUF file or a name as it was given
    print(f"use it with: trtspec generate {usage} --prompt ...", file=sys.stderr)
    return 0


def options_of(namespace: argparse.Namespace) -> HeadOptions:
    """Return the given options; the rest have their defaults."""
    kind = KINDS[namespace.kind]
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    given |= {"target": checkpoint_folder(namespace.target), "data": tuple(namespace.data)}
    given["run"] = namespace.run_folder or namespace.out.with_name(namespace.out.name + ".run")
    if "capture_layers" in given:
        given["capture_layers"] = _layers(given["capture_layers"])
    return kind(**given)


def draw(run: Path) -> None:
    """Draw metrics.png of a run, if there are metrics and matplotlib."""
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
