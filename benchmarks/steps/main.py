"""The command line of benchmarks/steps.py."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.notes import origin
from benchmarks.peers.runner import Probe
from benchmarks.steps.engines import Workshop
from benchmarks.steps.results import Result, as_json, report_markdown
from benchmarks.steps.sections import SECTIONS, Bench
from trtspec.bench import versions
from trtspec.ops import load_plugins


def main(description: str, argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, print markdown, and write JSON."""
    args = _arguments(description, argv)
    where = origin("benchmarks/steps.py", sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(args.threads)
    begin = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {what}", file=sys.stderr, flush=True)

    kernels = load_plugins().get("cpu", "none: the reference kernels serve")
    probe = Probe()
    workshop = Workshop(args.work.resolve(), report)
    bench = Bench(workshop, args.model, args.rounds, args.steps, args.threads, probe, report)
    results: list[Result] = []
    for name in args.only:
        report(name)
        results.append(SECTIONS[name](bench))
    machine = {
        **where,
        "model": args.model,
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "kernels": kernels,
        "probe": "C++ kernel" if probe.has_kernel else "torch sum",
        "machine": platform.machine(),
        "versions": versions(),
    }
    bandwidths = sorted(turn.read_bandwidth / 1e9 for result in results for turn in result.turns)
    about = f"{args.model}; {args.threads} threads; kernels: {kernels}; {args.rounds} rounds of {args.steps} steps"
    if bandwidths:
        machine["read_gbs"] = [bandwidths[0], bandwidths[-1]]
        about += f"; read bandwidth {bandwidths[0]:.1f} to {bandwidths[-1]:.1f} GB/s ({machine['probe']})"
    print(report_markdown(results, [about, *(f"{key}: {value}" for key, value in where.items())]))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**machine, "sections": as_json(results)}, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="246M", help="of rows, eagle3 and start (default 246M)")
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), help=f"of {','.join(SECTIONS)} (default all)")
    parser.add_argument("--rounds", type=int, default=7, help="measured, after one that warms up (default 7)")
    parser.add_argument("--steps", type=int, default=64, help="steps timed in a turn (default 64, at most 96)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch's (default: CPUs)")
    parser.add_argument("--work", type=Path, default=Path("runs/steps"), help="keeps checkpoints and engines")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.threads < 1 or not 1 <= args.steps <= 96:
        parser.error("--rounds and --threads must be at least 1, --steps between 1 and 96")
    return args


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(SECTIONS)}, separated by commas")
    return names
