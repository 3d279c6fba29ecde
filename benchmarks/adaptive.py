"""num_speculative_tokens = "auto" next to plain decoding and to fixed numbers of drafts, while text and load change.

    python benchmarks/adaptive.py demo
    python benchmarks/adaptive.py assistant --clients 1 4 8 1 --fixed 1 3 --method eagle3 --repeats 7

A trace has two phases for each number of clients. In "code" they ask for code, greedily. In "random" the temperature is
so high that text is hard to guess. A client asks again as soon as it has an answer. Each contestant runs the whole
trace in each repeat, in turns, and none is restarted between phases. A second engine of plain decoding gives the null:
how far equal contestants are apart.

The table has medians of ratios of tokens per second, prompts included. "auto / best" is against the fixed number of
drafts, 0 included, that is best in that phase. "null" is the lower quartile of plain / plain. Texts are checked.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.peers.notes import origin
from benchmarks.real.ours import speculation_of
from benchmarks.real.prompts import prompts_of
from benchmarks.steps.engines import Workshop
from examples.demo.__main__ import PROMPTS
from examples.demo.engines import HERE, TARGET
from examples.smollm2.__main__ import model_folder
from trtspec import LLM, SamplingParams
from trtspec.engine.draft_length import DraftLength
from trtspec.ops import load_plugins

RANDOM = 1.8
"""Temperature of the phases whose text is hard to guess."""


@dataclass
class Phase:
    """A part of the trace, and what each contestant did in it. speeds: tokens per second of each repeat."""

    clients: int
    text: str
    speeds: dict[str, list[float]] = field(default_factory=dict)
    verified: list[float] = field(default_factory=list)  # drafts that auto verified for each token, by repeat

    @property
    def temperature(self) -> float:
        return RANDOM if self.text == "random" else 0.0


def run_phase(llm: LLM, phase: Phase, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float, list[Any]]:
    """Answer all prompts with so many clients -> tokens per second, drafts verified per token, ids of the answers."""
    engine = llm.engine
    waiting = list(enumerate(prompts))[::-1]
    requests: list[Any] = []
    running = 0
    start = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and running < phase.clients:
            seed, prompt = waiting.pop()
            params = SamplingParams(
                temperature=phase.temperature, seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            requests += engine.add_request(prompt, params)
            running += 1
        running -= sum(emission.finished for emission in engine.step())
    seconds = time.perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
    made = sum(len(request.output_ids) for request in requests)
    drafts = sum(request.stats.num_draft_tokens for request in requests)
    return made / seconds, drafts / made, [request.output_ids for request in requests]


def speculation(model: str, method: str, K: Any) -> dict[str, Any]:
    """The speculative_config of a method for one of the two models."""
    config = speculation_of(method, K)
    assert config is not None
    return {**config, "model": str(HERE / "eagle3")} if model == "demo" and "model" in config else config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("demo", "assistant"))
    parser.add_argument("--method", default="eagle3", choices=("eagle3", "ngram", "suffix"))
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 3, 5], help="numbers of drafts to compare with")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 1])
    parser.add_argument("--answers", type=int, default=2, help="answers of each client in a phase")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
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
    phases = [Phase(clients, text) for clients in args.clients for text in ("code", "random")]
    different: set[str] = set()
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name, wish in wishes.items():
            inside = wish if args.method == "eagle3" else None
            slug = f"{args.model}-{args.method if inside else 'plain'}-{name.split()[-1] if inside else ''}"
            folder = shop.engine(slug, checkpoint, inside, **limits)
            report(f"loading {name}")
            lookup = None if inside else wish
            llm = LLM(folder, lookup, generation_config="off", enable_prefix_caching=False)
            engines[name] = stack.enter_context(llm)
        tokenizer = engines["plain"].tokenizer
        assert tokenizer is not None
        most = max(args.clients) * args.answers
        asked = (
            [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(most)]
            if args.model == "demo"
            else prompts_of("HumanEval", tokenizer, most)
        )
        for repeat in range(args.repeats + 1):
            report(f"repeat {repeat} of {args.repeats}")
            names = list(engines)
            random.Random(repeat).shuffle(names)
            texts: dict[str, list[Any]] = {}
            for name in names:
                texts[name] = []
                for phase in phases:
                    count = phase.clients * args.answers
                    speed, drafts, ids = run_phase(engines[name], phase, asked[:count], args.max_tokens)
                    texts[name].append(ids)
                    if repeat > 0:
                        phase.speeds.setdefault(name, []).append(speed)
                        if name == "auto":
                            phase.verified.append(drafts)
            different |= {name for name in names if texts[name] != texts["plain"]}
        chooser = engines["auto"].engine.loop.proposer.chooser
        assert isinstance(chooser, DraftLength)
        cells = chooser.costs.to_json()
    show(phases, [f"K = {K}" for K in args.fixed])
    facts = {"kernels": load_plugins().get("cpu", "reference"), **origin("benchmarks/adaptive.py", sys.argv[1:])}
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    if args.json:
        rows = [vars(phase) for phase in phases]
        args.json.write_text(json.dumps({**facts, "rows": rows, "step_times": cells}, indent=1) + "\n")
    for name in sorted(different):
        print(f"the text of {name} differs from plain decoding: that is a bug", file=sys.stderr)
    return 1 if different else 0


def show(phases: Sequence[Phase], fixed: Sequence[str]) -> None:
    """Print a row for each phase."""
    print(f"| clients | text | plain, tokens/s | {' | '.join(fixed)} | auto | auto / best | null | drafts a token |")
    print("|" + "---|" * (7 + len(fixed)))
    for phase in phases:

        def ratio(name: str, base: str, phase: Phase = phase) -> list[float]:
            return [own / other for own, other in zip(phase.speeds[name], phase.speeds[base], strict=True)]

        best = max(("plain", *fixed), key=lambda name: statistics.median(phase.speeds[name]))
        null = statistics.quantiles(ratio("plain again", "plain"), n=4)[0] if len(phase.verified) > 1 else 1.0
        cells = [f"{statistics.median(phase.speeds['plain']):.0f}"]
        cells += [f"{statistics.median(ratio(name, 'plain')):.2f}x" for name in (*fixed, "auto")]
        cells += [f"{statistics.median(ratio('auto', best)):.2f}x", f"{null:.3f}"]
        cells += [f"{statistics.median(phase.verified):.2f}"]
        print(f"| {phase.clients} | {phase.text} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
