"""The command line of benchmarks/peers.py."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.checkpoints import CIRCLE, MODELS, open_model
from benchmarks.peers.contests import INPUT_LEN, LABELS, NGRAM, PEERS, WHAT, groups
from benchmarks.peers.environments import given_python, python_of
from benchmarks.peers.process import PeerError
from benchmarks.peers.results import as_json, markdown, plot, rows_table, show, starts_table, summarise
from benchmarks.peers.runner import Runner

RANDOM_NOTE = (
    f"40M and 246M have random weights that count in circles of {CIRCLE} tokens, so every engine writes the same text "
    "and lookup proposes the same drafts: acceptance is equal by construction (column `tokens per step`), not forced. "
    "There is no trained draft for them: draft model and EAGLE3 run on the demo models only."
)
NOTES = {
    "ngram": (
        f"n-gram lookup: K={NGRAM['num_speculative_tokens']}, n-grams of {NGRAM['prompt_lookup_min']} to "
        f"{NGRAM['prompt_lookup_max']} tokens. transformers and llama-cpp-python have no lower limit (they look up "
        "single tokens too) and look up for one sequence only."
    ),
    "draft": "transformers' assisted generation takes one sequence only.",
    "startup": (
        "constructor to first token: one start each, of a compiled engine folder (trtspec), of the checkpoint "
        "(trtspec eager, transformers), of a GGUF file (llama.cpp); vLLM compiles, or finds what an earlier run "
        "compiled in WORK/vllm-cache. Peak memory: of all processes, with mapped files, over the contests of that "
        "start; vLLM's has 1 GiB of KV cache."
    ),
}


def main(description: str, argv: Sequence[str] | None = None) -> int:
    """Runs everything asked for and shows it. 1 where a contestant failed."""
    args = _arguments(description, argv)
    console = Console(stderr=True)
    start = time.perf_counter()

    def report(what: str) -> None:
        console.print(f"{time.perf_counter() - start:7.1f} s  {what}", highlight=False, markup=False, soft_wrap=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, as Ctrl-C does
    args.work = args.work.resolve()
    notes: list[str] = []
    pythons = {"trtspec": sys.executable, **_pythons(args, report, notes)}
    runner = Runner(args.work, pythons, args.threads, args.repeats, report, notes=notes)
    try:
        for name in args.model:
            model = open_model(name, args.work / "checkpoints")
            for group in groups(model, set(args.what), set(pythons), args.output_len):
                runner.run(model, group)
    except KeyboardInterrupt:
        notes.append("interrupted: the figures are incomplete")
    _publish(args, runner)
    return 1 if notes else 0


def _pythons(args: argparse.Namespace, report: Callable[[str], None], notes: list[str]) -> dict[str, str]:
    """Of each peer asked for; one that cannot be had is a note."""
    found = {}
    for peer in args.only:
        try:
            given = getattr(args, f"{peer}_python")
            log = args.work / "logs" / f"{peer}-environment.log"
            folder = args.work / peer
            found[peer] = given_python(peer, given) if given else python_of(peer, folder, log, args.threads, report)
        except PeerError as error:
            notes.append(str(error))
            report(notes[-1])
    return found


def _publish(args: argparse.Namespace, runner: Runner) -> None:
    """To the terminal and to the files asked for."""
    rows = summarise(runner.runs, runner.starts)
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    if rows:
        tables.append((f"trtspec and its peers: medians of {args.repeats}", *rows_table(rows)))
    if runner.starts:
        tables.append(("starts", *starts_table(runner.starts)))
    notes = [RANDOM_NOTE] if set(args.model) - {"demo"} else []
    notes += [NOTES[what] for what in args.what if what in NOTES] + runner.notes
    machine: dict[str, Any] = {
        "machine": platform.machine(),
        "threads": args.threads,
        "tokens in, out": f"{INPUT_LEN}, {args.output_len}",
        "read bandwidth probe": "C++ kernel" if runner.probe.has_kernel else "torch sum",
        "versions": ", ".join(f"{LABELS[peer]} {version}" for peer, version in runner.versions.items()),
    }
    if runner.runs:
        bandwidths = sorted(run.read_bandwidth / 1e9 for run in runner.runs)
        machine["read bandwidth, GB/s"] = [round(bandwidths[0], 1), round(bandwidths[-1], 1)]
    about = "; ".join(f"{key}: {value}" for key, value in machine.items())
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, header, cells in tables:
        show(console, title, header, cells)
    for line in (about, *notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.markdown:
        text = "\n".join(markdown(header, cells) for _, header, cells in tables)
        _write(args.markdown, text + "\n" + "\n".join(f"- {line}" for line in (about, *notes)) + "\n")
    if args.json:
        data = {**machine, "notes": notes, **as_json(runner.runs, runner.starts, rows)}
        _write(args.json, json.dumps(data, indent=1) + "\n")
    if args.png and rows:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, args.png)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_some_of(PEERS), default=PEERS, help=f"of {','.join(PEERS)} (default all)")
    parser.add_argument("--model", type=_some_of(MODELS), default=MODELS, help=f"of {','.join(MODELS)} (default all)")
    parser.add_argument("--what", type=_some_of(WHAT), default=WHAT, help=f"of {','.join(WHAT)} (default all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate (default 128, at most 256)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every contestant (default: CPUs)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/peers"), help="keeps environments, checkpoints, engines"
    )
    for peer in PEERS:
        parser.add_argument(f"--{peer}-python", help=f"of an environment that has {peer}, instead of one under --work")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.threads < 1 or not 2 <= args.output_len <= 256:
        parser.error("--repeats and --threads must be at least 1, --output-len between 2 and 256")
    return args


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = sorted(set(names) - set(known))
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}, separated by commas")
        return names

    return parse
