"""The command line of benchmarks/gpu.py."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.card import Card, copy_bandwidth, open_card, versions
from benchmarks.gpu.checkpoints import SHAPES
from benchmarks.gpu.results import Result, write
from benchmarks.gpu.sections import SECTIONS, Bench, Report
from benchmarks.peers.notes import ROOT, origin
from trtspec.errors import TrtSpecError
from trtspec.ops import load_plugins

COPY_BYTES = 2**32


def main(description: str, argv: Sequence[str] | None = None, open_: Callable[[], Card] = open_card) -> int:
    """Measure what the command line asks for, and write all results after each section.

    It returns 1 if a section failed or there is no GPU.
    """
    args = _arguments(description, argv)
    begin = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {what}", file=sys.stderr, flush=True)

    try:
        card = open_()
    except TrtSpecError as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 1
    about = {
        "date": datetime.date.today().isoformat(),
        **origin("benchmarks/gpu.py", sys.argv[1:] if argv is None else argv),
        **card.about,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "kernels": "; ".join(map(": ".join, load_plugins().items())) or "none: the reference kernels serve",
        "steps": f"{args.steps} a case, {args.turns} turns",
    }
    bandwidth = copy_bandwidth(card, args.copy_bytes)
    card.release()
    about["copy bandwidth"] = f"{bandwidth / 1e9:.1f} GB/s, bytes read and written"
    for name, value in about.items():
        report(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as made:
        work = Path(made) if args.work is None else args.work.resolve()
        bench = Bench(card, work, bandwidth, args.batches, args.steps, args.turns, args.static_cache, report)
        results: list[Result] = []
        for shape in args.shapes:
            for section in args.only:
                results.append(measure(bench, section, shape, report))
                file, page = write(args.out, about, bandwidth, results)
            bench.close()
    print(page.read_text(encoding="utf-8"))
    report(f"written: {file}, {page}")
    return 1 if any(result.error is not None for result in results) else 0


def measure(bench: Bench, section: str, shape: str, report: Report) -> Result:
    """Return what a section measured until it ended or failed."""
    result, start = Result(section, shape), time.perf_counter()
    report(f"{shape}: {section}")
    try:
        SECTIONS[section](bench, result)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        report(f"{shape}: {section} failed: {result.error}")
    if result.error is not None:  # outside the handler, as memory that the exception refers to is not freed within it
        bench.close()
    result.seconds = time.perf_counter() - start
    return result


def _arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_names(SECTIONS), default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--shapes", type=_names(SHAPES), default=list(SHAPES), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--batches", type=_sizes, default=[1, 8, 32], help="default 1,8,32")
    parser.add_argument("--steps", type=int, default=100, help="timed for each case (default 100, at most 200)")
    parser.add_argument("--turns", type=int, default=5, help="of what is compared (default 5)")
    parser.add_argument("--quick", action="store_true", help="20 steps, 2 turns, and the first shape alone")
    parser.add_argument("--static-cache", action="store_true", help="transformers' static cache, which compiles")
    parser.add_argument("--work", type=Path, help="keeps checkpoints; default a temporary folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.turns, args.shapes = 20, 2, args.shapes[:1]
    if not 2 <= args.steps <= 200 or args.turns < 1:
        parser.error("--steps must be between 2 and 200, --turns at least 1")
    return args


def _names(known: Sequence[str] | dict[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names or not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}, separated by commas")
        return names

    return parse


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes from 1 on, separated by commas")
    return sizes
