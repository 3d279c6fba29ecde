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

from benchmarks.peers.checkpoints import MODELS, open_model
from benchmarks.peers.contests import INPUT_LEN, LABELS, PEERS, VLLM_MODES, WHAT, groups
from benchmarks.peers.environments import given_python, python_of
from benchmarks.peers.notes import notes, origin
from benchmarks.peers.process import PeerError
from benchmarks.peers.results import as_json, markdown, plot, rows_table, show, starts_table, summarise
from benchmarks.peers.runner import Runner


def main(description: str, argv: Sequence[str] | None = None) -> int:
    """Run everything asked for and show it. Returns 1 if a contestant failed."""
    args = _arguments(description, argv)
    where = origin("benchmarks/peers.py", sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True)
    start = time.perf_counter()

    def report(what: str) -> None:
        console.print(f"{time.perf_counter() - start:7.1f} s  {what}", highlight=False, markup=False, soft_wrap=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, as Ctrl-C does
    args.work = args.work.resolve()
    failures: list[str] = []
    pythons = {"trtspec": sys.executable, **_pythons(args, report, failures)}
    runner = Runner(args.work, pythons, args.threads, args.repeats, report, failures=failures)
    try:
        for name in args.model:
            model = open_model(name, args.work / "checkpoints")
            for group in groups(model, set(args.what), set(pythons), args.output_len, args.vllm_modes):
                runner.run(model, group)
    except KeyboardInterrupt:
        failures.append("interrupted: the figures are incomplete")
    _publish(args, runner, where)
    return 1 if failures else 0


def _pythons(args: argparse.Namespace, report: Callable[[str], None], failures: list[str]) -> dict[str, str]:
    """Python program of each peer asked for; a peer that is not available is a failure."""
    found = {}
    for peer in args.only:
        try:
            given = getattr(args, f"{peer}_python")
            log = args.work / "logs" / f"{peer}-environment.log"
            folder = args.work / peer
            found[peer] = given_python(peer, given) if given else python_of(peer, folder, log, args.threads, report)
        except PeerError as error:
            failures.append(str(error))
            report(failures[-1])
    return found


def _publish(args: argparse.Namespace, runner: Runner, where: dict[str, str]) -> None:
    """Write the tables to the terminal and to the files asked for, each with every note, failures included."""
    rows = summarise(runner.runs, runner.starts)
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    if rows:
        tables.append((f"trtspec and its peers: medians of {args.repeats}", *rows_table(rows)))
    if runner.starts:
        tables.append(("starts", *starts_table(runner.starts)))
    said = [*runner.failures, *notes(args.model, args.what, runner.pythons)]
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
    lines = [about, *(f"{key}: {value}" for key, value in where.items()), *said]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.markdown:
        text = "\n".join(markdown(header, cells) for _, header, cells in tables)
        _write(args.markdown, text + "\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    if args.json:
        data = {**machine, **where, "notes": said, **as_json(runner.runs, runner.starts, rows)}
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
    parser.add_argument(
        "--vllm-modes", type=_some_of(VLLM_MODES), default=VLLM_MODES, help=f"of {','.join(VLLM_MODES)} (default both)"
    )
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
