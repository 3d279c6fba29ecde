"""The command line of benchmarks/real.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers.notes import origin
from benchmarks.real.contest import PEERS, Contest, Task, fastest, figures
from benchmarks.real.ours import WITH_HEAD, Own, Run, open_engine, run_queue, sampling
from benchmarks.real.picture import draw
from benchmarks.real.prompts import SETS, prompts_of, turns_of
from benchmarks.steps.engines import Workshop
from examples.smollm2.__main__ import model_folder
from trtspec import LLM
from trtspec.ops import load_plugins
from trtspec.text import Tokenizer

Table = list[list[str]]
Rows = list[dict[str, Any]]


def main(description: str, argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and print Markdown. Returns 1 if a text differs from plain decoding's or a peer fails.

    Raw rows go to --json as they are measured.
    """
    args = _arguments(description, argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the peers' processes, too
    begin = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {what}", file=sys.stderr, flush=True)

    facts = {"kernels": load_plugins().get("cpu", "reference"), **origin("benchmarks/real.py", sys.argv[1:])}

    def keep(rows: Rows, **more: Rows) -> None:
        if args.json:
            args.json.write_text(json.dumps({**facts, "section": args.section, **more, "rows": rows}, indent=1) + "\n")

    shop = Workshop(args.work.resolve(), report)
    failures: list[str] = []
    if args.section == "peers":
        own = (dict(args.schedule), args.thresholds, args.auto)
        contest = Contest(shop, args.threads, report, *own, args.prefix_caching, failures=failures)
        table, rows = peers(args, contest, keep)
    else:
        table, rows = (acceptance if args.section == "acceptance" else speed)(args, shop, report, keep)
    if args.png and args.section == "peers" and any(row["temperature"] == 0 for row in rows):
        draw(rows, args.png)
    head, *cells = table
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in cells:
        print("| " + " | ".join(row) + " |")
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    failures += [f"the text of {row} differs from plain decoding: that is a bug" for row in rows if not row["lossless"]]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def acceptance(
    args: argparse.Namespace, shop: Workshop, report: Callable[[str], None], keep: Callable[[Rows], None]
) -> tuple[Table, Rows]:
    """Run each method in turn over all prompts, eight at a time."""
    rows: Rows = []
    with open_engine(shop, "plain", 0, "bf16") as llm:
        asked = {name: _asked(llm, name, args.prompts, 1) for name in args.sets}
        plain = {
            (name, T): run_queue(llm, prompts, sampling(T, len(prompts), args.max_tokens), 8).texts
            for name, prompts in asked.items()
            for T in args.temperatures
        }
    for method in args.methods:
        for K in args.k:
            with open_engine(shop, method, K, "bf16") as llm:
                for name, prompts in asked.items():
                    for T in args.temperatures:
                        run = run_queue(llm, prompts, sampling(T, len(prompts), args.max_tokens), 8)
                        stats = run.speculation
                        report(f"{method}, K = {K}, {name}, T = {T:g}: {stats.acceptance_length:.2f}")
                        rows.append(
                            {
                                "set": name, "temperature": T, "method": method, "k": K, "prompts": len(prompts),
                                "acceptance_length": stats.acceptance_length, "tokens_per_step": stats.tokens_per_step,
                                "acceptance_per_position": stats.acceptance_per_position, "steps": stats.steps,
                                "lossless": run.texts == plain[name, T],
                            }
                        )  # fmt: skip
                        keep(rows)
    table = [["prompts", "T", "method", "K", "acceptance length", "tokens per step", "accepted at 1..K, %"]]
    for row in rows:
        shares = " ".join(f"{100 * share:.0f}" for share in row["acceptance_per_position"])
        figures = (f"{row[name]:.2f}" for name in ("acceptance_length", "tokens_per_step"))
        table.append([row["set"], f"{row['temperature']:g}", row["method"], str(row["k"]), *figures, shares])
    return table, rows


def speed(
    args: argparse.Namespace, shop: Workshop, report: Callable[[str], None], keep: Callable[[Rows], None]
) -> tuple[Table, Rows]:
    """Measure cells: a cell is a format, a batch, a set of prompts and a temperature. Its engines take turns."""
    (K,) = args.k[:1]
    rows = []
    with_head = [method for method in args.methods if method in WITH_HEAD]
    wanted = [Own("plain"), Own("rows"), *(Own(method) for method in args.methods if method not in WITH_HEAD)]
    for head in args.head_formats if with_head else ():
        wanted += [*(Own(method, head) for method in with_head), Own("two-engine", head)]
    for format in args.formats:
        with ExitStack() as stack:
            engines = {own: stack.enter_context(open_engine(shop, own.method, K, format, own.head)) for own in wanted}
            for batch, name, T in product(args.batches, args.sets, args.temperatures):
                where = f"{format}, batch {batch}, {name}, T = {T:g}"
                prompts = _asked(engines[wanted[0]], name, args.prompts, 2 * batch)  # else few steps are full
                runs = _rounds(args, engines, prompts, batch, T, lambda what, w=where: report(f"{w}: {what}"))
                cell = {"format": format, "batch": batch, "set": name, "temperature": T, "k": K}
                found = [{**cell, **row} for row in _figures(runs)]
                for row in found:
                    allowed = "" if row["of_allowed"] is None else f", of what is allowed {row['of_allowed']:.2f}"
                    report(f"{where}: {row['method']} {row['head_format']} {row['speed_up']:.2f}x{allowed}")
                rows += found
                keep(rows)
    heads = ["format", "batch", "prompts", "T", "method", "tok/s", "speed-up", "acceptance length", "t(K+1)/t(1)"]
    table = [[*heads, "t(head)/t(1)", "of what arithmetic allows", "MB a step"]]
    for row in rows:
        cells = [row["format"], str(row["batch"]), row["set"], f"{row['temperature']:g}", row["method"]]
        cells[-1] += f", head {row['head_format']}" if row["method"] in WITH_HEAD else ""
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['speed_up']:.2f}x", f"{row['acceptance_length']:.2f}"]
        allowed = "" if row["of_allowed"] is None else f"{row['of_allowed']:.2f}"
        cells += [f"{row['rows_cost']:.3f}", f"{row['head_cost']:.3f}", allowed, f"{row['bytes_per_step'] / 1e6:.0f}"]
        table.append(cells)
    return table, rows


def peers(args: argparse.Namespace, contest: Contest, keep: Callable[..., None]) -> tuple[Table, Rows]:
    """Measure cells: a cell is a format, a batch, a set of prompts and a temperature.

    The fastest setting of each method takes turns with those of the others. The first set and the lowest temperature
    decide which setting is fastest.
    """
    tokenizer = Tokenizer.from_folder(model_folder())
    assert tokenizer is not None
    rows: Rows = []
    alone: Rows = []
    tasks = []
    for batch, name, T in product(args.batches, args.sets, args.temperatures):
        count = args.prompts and max(args.prompts, 2 * batch)
        try:
            prompts = turns_of(name, tokenizer, count, args.rounds + 1, batch, args.prefix_caching)
        except ValueError as error:
            sys.exit(f"--prefix-caching: {error}")
        tasks.append((name, Task(*prompts, batch, T, args.max_tokens)))
    for format in args.formats:
        entries = contest.entries(args.peers, format, args.head_formats, args.k, args.p_min)
        first = [own for name, own in tasks if (name, own.temperature) == (args.sets[0], min(args.temperatures))]
        with contest.workers(entries, first) as (workers, sweep):
            alone += [
                {"peer": entry.peer, "setting": entry.setting, "format": format, "batch": batch,
                 "tokens_per_second": turn.tokens_per_second, "tokens_per_step": turn.tokens_per_step}
                for (entry, batch), turn in sweep.items()
            ]  # fmt: skip
            for name, task in tasks:
                batch, T = task.batch, task.temperature
                turns = contest.measure(workers, fastest(sweep, batch), task)
                cell = {"batch": batch, "set": name, "temperature": T}
                found = [{**cell, **row} for row in figures(turns)]
                where = f"{format}, batch {batch}, {name}, T = {T:g}"
                for row in found:
                    figure = f"{row['tokens_per_second']:.0f} tok/s, {row['tokens_per_step']:.2f} tokens per step"
                    contest.report(f"{where}: {row['peer']}, {row['setting']}: {figure}")
                rows += found
                keep(rows, alone=alone)
    heads = ["format", "batch", "prompts", "T", "engine", "setting", "tok/s", "our best / it", "tokens per step"]
    table = [[*heads, "texts equal ours", "target, MB"]]
    for row in rows:
        cells = [row["format"], str(row["batch"]), row["set"], f"{row['temperature']:g}", row["peer"], row["setting"]]
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['ours_over_it']:.2f}x", f"{row['tokens_per_step']:.2f}"]
        cells += [f"{row['texts_equal_ours']}/{row['prompts']}", f"{row['target_bytes'] / 1e6:.0f}"]
        table.append(cells)
    return table, rows


def _rounds(
    args: argparse.Namespace,
    engines: dict[Own, LLM],
    prompts: list[list[int]],
    batch: int,
    temperature: float,
    report: Callable[[str], None],
) -> dict[Own, list[Run]]:
    """Run every engine once a round, in an order that rotates."""
    names = list(engines)
    runs: dict[Own, list[Run]] = {name: [] for name in names}
    for number in range(args.rounds + 1):
        report(f"round {number} of {args.rounds}" if number else "warming up")
        some = prompts if number else prompts[:batch]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run = run_queue(engines[name], some, sampling(temperature, len(some), args.max_tokens), batch)
            if number:
                runs[name].append(run)
    return runs


def _figures(runs: dict[Own, list[Run]]) -> list[dict[str, Any]]:
    """A row for plain decoding and one for each method."""

    def median(of: Callable[[dict[Own, Run]], float]) -> float:
        return statistics.median(of(dict(zip(runs, each, strict=True))) for each in zip(*runs.values(), strict=True))

    found = []
    plain, wrong = Own("plain"), Own("rows")
    rows_cost = median(lambda r: r[wrong].step / r[plain].step)
    for own in runs:
        if own.method in ("rows", "two-engine"):
            continue
        head_cost, of_allowed = 0.0, None
        length = runs[own][0].speculation.acceptance_length
        speed_up = median(lambda r, o=own: r[o].tokens_per_second / r[plain].tokens_per_second)
        if own.method in WITH_HEAD:
            two_engine = Own("two-engine", own.head)
            head_cost = median(lambda r, o=two_engine: sum(r[o].launches[1:]) / r[o].steps / r[plain].step)
            of_allowed = speed_up / (length / (rows_cost + head_cost))
        found.append(
            {
                "method": own.method,
                "head_format": own.head,
                "tokens_per_second": statistics.median(run.tokens_per_second for run in runs[own]),
                "speed_up": speed_up,
                "acceptance_length": length,
                "tokens_per_step": runs[own][0].speculation.tokens_per_step,
                "rows_cost": rows_cost,
                "head_cost": head_cost,
                "of_allowed": of_allowed,
                "bytes_per_step": runs[own][0].bytes_read / runs[own][0].steps,
                "lossless": all(run.texts == runs[plain][0].texts for run in runs[own]),
            }
        )
    return found


def _asked(llm: LLM, name: str, count: int | None, least: int) -> list[list[int]]:
    """Prompts of a set, at least `least` of them."""
    assert llm.tokenizer is not None
    return prompts_of(name, llm.tokenizer, count and max(count, least))


def _pair(text: str) -> tuple[int, int]:
    batch, K = map(int, text.split(":"))
    return batch, K


def _arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("acceptance", "speed", "peers"))
    parser.add_argument(
        "--methods", nargs="+", choices=("ngram", "suffix", "eagle3", "combined"), default=("eagle3", "ngram", "suffix")
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 0.8))
    parser.add_argument("--k", nargs="+", type=int, default=(3, 5), help="drafts a step; of speed the first alone")
    parser.add_argument("--formats", nargs="+", choices=("bf16", "int8", "int4"), default=("bf16",), help="of speed")
    parser.add_argument(
        "--head-formats",
        nargs="+",
        choices=("bf16", "int8"),
        default=("bf16",),
        help="of EAGLE3's head; peers have the first alone",
    )
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 4, 8), help="of speed")
    parser.add_argument("--rounds", type=int, default=3, help="of speed")
    parser.add_argument("--prompts", type=int, help="of each set (default: all)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=("vllm",), help="none: our own methods alone")
    parser.add_argument("--p-min", nargs="+", type=float, default=(0.0, 0.5), help="of llama.cpp: to go on drafting")
    parser.add_argument(
        "--schedule", nargs="+", type=_pair, default=((2, 3), (5, 2), (8, 1)), metavar="BATCH:K",
        help="of peers: one more setting, K drafts in batches of up to so many (default 2:3 5:2 8:1)",
    )  # fmt: skip
    parser.add_argument(
        "--thresholds", nargs="*", type=float, default=(0.3, 0.6), help="of peers: more settings of our EAGLE3"
    )
    parser.add_argument("--auto", action="store_true", help='of peers: one more setting of our methods, "auto"')
    parser.add_argument(
        "--prefix-caching",
        action="store_true",
        help="of peers, for one batch and temperature: engines keep prompts' KV, and no prompt comes twice",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of peers")
    parser.add_argument("--work", type=Path, default=Path("runs/real"), help="keeps engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="of peers")
    args = parser.parse_args(argv)
    if args.prefix_caching and len(args.batches) * len(args.temperatures) > 1:
        parser.error("--prefix-caching wants one of --batches and one of --temperatures: else prompts come twice")
    return args
