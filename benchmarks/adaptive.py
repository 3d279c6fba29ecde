"""num_speculative_tokens = "auto" next to plain decoding and to fixed numbers of drafts, while text and load change.

    python benchmarks/adaptive.py demo
    python benchmarks/adaptive.py assistant --clients 1 4 8 1 --fixed 1 3 --method eagle3 --repeats 7
    python benchmarks/adaptive.py demo --clients 1 8 --fixed 3 --disturbed 0.2 2.5
    python benchmarks/adaptive.py assistant --clients 1 8 --fixed 3 --by-step --max-tokens 200

A trace has two loads for each number of clients. In "code" they ask for code, greedily. In "random" the temperature is
so high that text is hard to guess. `trtspec bench adaptive` is the same for any model, and trtspec/bench/adaptive.py
says how it measures. A second engine of plain decoding gives the null: how far equal contestants are apart.

The table has medians of ratios of tokens per second, prompts included. "auto / best" is against the fixed number of
drafts, 0 included, that is best in that load. "null" is the lower quartile of plain / plain. Texts are checked.

--disturbed adds engines that begin with wrong step times: what drafts add to a plain step is that many times as long.
One of them corrects the times by those of its steps, as every engine does. The other one keeps them.

--by-step instead lets engines take turns step by step, in whole batches of each number of clients, greedily (turns.py).
Its table has the time of a token over plain decoding's, so less is better.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.peers.notes import origin
from benchmarks.real.ours import speculation_of
from benchmarks.real.prompts import prompts_of
from benchmarks.steps.engines import Workshop
from benchmarks.turns import run_turns
from examples.demo.__main__ import PROMPTS
from examples.demo.engines import HERE, TARGET
from examples.smollm2.__main__ import model_folder
from trtspec import LLM
from trtspec.bench.adaptive import Load, run_trace, summary
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.observed_costs import ObservedCosts
from trtspec.engine.step_costs import Cell, StepCosts
from trtspec.ops import load_plugins

RANDOM = 1.8
"""Temperature of the loads whose text is hard to guess."""


def speculation(model: str, method: str, K: Any) -> dict[str, Any]:
    """The speculative_config of a method for one of the two models."""
    config = speculation_of(method, K)
    assert config is not None
    return {**config, "model": str(HERE / "eagle3")} if model == "demo" and "model" in config else config


def chooser_of(llm: LLM) -> DraftLength:
    """The part of an engine that chooses numbers of drafts."""
    chooser = llm.engine.loop.proposer.chooser
    assert isinstance(chooser, DraftLength)
    return chooser


def disturbed_cells(costs: StepCosts, factor: float) -> list[Cell]:
    """The cells of `costs`, where what drafts add to a plain step takes `factor` times as long."""
    plain = {cell.batch: cell.seconds for cell in costs.cells if not cell.made and not cell.verified}
    return [
        replace(cell, seconds=plain[cell.batch] + factor * max(cell.seconds - plain[cell.batch], 0.0))
        for cell in costs.cells
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("demo", "assistant"))
    parser.add_argument("--method", default="eagle3", choices=("eagle3", "ngram", "suffix"))
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 3, 5], help="numbers of drafts to compare with")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 1])
    parser.add_argument("--answers", type=int, default=2, help="answers of each client in a load")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--disturbed", type=float, nargs="*", default=[], metavar="FACTOR", help="wrong step times")
    parser.add_argument("--by-step", action="store_true", help="engines take turns step by step")
    parser.add_argument("--work", type=Path, default=Path("runs/adaptive"))
    parser.add_argument("--json", type=Path, help="raw rows")
    args = parser.parse_args()
    begin = time.perf_counter()

    def report(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.1f} s  {what}", file=sys.stderr, flush=True)

    shop = Workshop(args.work.resolve(), report)
    checkpoint = TARGET if args.model == "demo" else model_folder()
    limits = {"max_batch_size": max(args.clients), "max_seq_len": 1024}
    wishes: dict[str, dict[str, Any] | None] = {"plain": None, "plain again": None}
    wishes |= {f"K = {K}": speculation(args.model, args.method, K) for K in args.fixed}
    wishes["auto"] = speculation(args.model, args.method, "auto")
    kinds: dict[str, type[StepCosts]] = {"corrected": ObservedCosts, "kept": StepCosts}
    disturbed = {f"times {factor:g} {kind}": (factor, kind) for factor in args.disturbed for kind in kinds}
    wishes |= dict.fromkeys(disturbed, wishes["auto"])
    loads = [Load(clients, temperature) for clients in args.clients for temperature in (0.0, RANDOM)]
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name, wish in wishes.items():
            inside = wish if args.method == "eagle3" else None
            K = inside["num_speculative_tokens"] if inside else ""
            slug = f"{args.model}-{args.method if inside else 'plain'}-{K}"
            folder = shop.engine(slug, checkpoint, inside, **limits)
            report(f"loading {name}")
            lookup = None if inside else wish
            llm = LLM(folder, lookup, generation_config="off", enable_prefix_caching=False)
            engines[name] = stack.enter_context(llm)
            if name in disturbed:
                factor, kind = disturbed[name]
                chooser = chooser_of(llm)
                chooser.costs = kinds[kind](disturbed_cells(chooser.costs, factor))
        tokenizer = engines["plain"].tokenizer
        assert tokenizer is not None
        most = max(args.clients) * args.answers
        asked = (
            [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(most)]
            if args.model == "demo"
            else prompts_of("HumanEval", tokenizer, most)
        )
        if args.by_step:
            found = [run_turns(engines, asked, B, args.max_tokens, args.repeats, report) for B in args.clients]
            rows, different = [row for own, _ in found for row in own], set().union(*(names for _, names in found))
        else:
            different = run_trace(engines, loads, asked, args.max_tokens, args.repeats, report)
            rows = [summary(load, [f"K = {K}" for K in args.fixed], list(disturbed)) for load in loads]
        cells = chooser_of(engines["auto"]).costs.to_json()
    (show_turns if args.by_step else show)(rows)
    facts = {"kernels": load_plugins().get("cpu", "reference"), **origin("benchmarks/adaptive.py", sys.argv[1:])}
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    if args.json:
        if not args.by_step:
            rows = [{**row, "speeds": load.speeds} for row, load in zip(rows, loads, strict=True)]
        args.json.write_text(json.dumps({**facts, "rows": rows, "step_times": cells}, indent=1) + "\n")
    for name in sorted(different):
        print(f"the text of {name} differs from plain decoding: that is a bug", file=sys.stderr)
    return 1 if different else 0


def show_turns(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each engine and number of clients."""
    print("| clients | engine | time of a token / plain's | host, ms a step | steps |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = str(row["batch"]), row["engine"], f"{row['token_over_plain']:.3f}", f"{row['host_ms']:.2f}"
        print(f"| {' | '.join(cells)} | {row['steps']} |")


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each load."""
    names = list(rows[0]["speedups"])
    print(f"| clients | text | plain, tokens/s | {' | '.join(names)} | auto / best | null | drafts a token |")
    print("|" + "---|" * (6 + len(names)))
    for row in rows:
        cells = [str(row["clients"]), "random" if row["temperature"] else "code", f"{row['plain_tok_s']:.0f}"]
        cells += [f"{ratio:.2f}x" for ratio in (*row["speedups"].values(), row["auto_over_best"])]
        cells += ["" if row["null"] is None else f"{row['null']:.3f}", f"{row['drafts_per_token']:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
