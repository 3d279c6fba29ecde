"""Draft trees next to chains: accepted tokens and speed, with as many rows and with fewer.

    python benchmarks/trees.py demo --method medusa
    python benchmarks/trees.py assistant --prompts 8 --max-tokens 64
    python benchmarks/trees.py assistant --method suffix

Each shape is an engine of its own. "grown" and "merged" trees are shaped by each step. All engines answer the same
prompts, one at a time, greedily and at temperature 0.8, in turns. The table has medians of ratios of tokens per second
to plain decoding, on the same backend, prompts included. Texts are checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.peers.notes import origin
from benchmarks.real.ours import speculation_of
from benchmarks.real.prompts import prompts_of
from examples.demo.__main__ import PROMPTS
from examples.demo.engines import HERE, TARGET
from examples.smollm2.__main__ import model_folder
from trtspec import LLM, SamplingParams
from trtspec.config.tree import chain
from trtspec.ops import load_plugins
from trtspec.outputs import SpeculationStats

SHAPES: dict[str, list[tuple[int, ...]]] = {
    **{f"chain, K = {K}": list(chain(K)) for K in (1, 3, 5, 7)},
    "5 nodes": [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)],
    "7 nodes": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
    "7 nodes, depth 4": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)],
    "15 nodes": [
        *((i,) for i in range(4)),
        *((0, i) for i in range(3)), (1, 0), (1, 1), (2, 0),
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0),
    ],
}  # fmt: skip


GROWN: dict[str, dict[str, int]] = {  # a shape of their own in each step, by a model
    f"grown, {nodes} nodes": {
        "num_speculative_tokens": depth,
        "dynamic_tree_max_topK": top_k,
        "max_total_draft_tokens": nodes,
    }
    for nodes, depth, top_k in ((5, 3, 2), (7, 4, 3), (15, 5, 4))
}
MERGED: dict[str, dict[str, int]] = {  # by a drafter on the host
    f"merged, {nodes} nodes": {"num_speculative_tokens": depth, "max_total_draft_tokens": nodes}
    for nodes, depth in ((5, 3), (7, 5), (15, 7))
}
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {},
}


def shapes_for(method: str, heads: int) -> dict[str, dict[str, Any]]:
    """The settings of each shape that the method can have. heads: largest depth, 0 = any."""
    chains = {
        name: {"num_speculative_tokens": len(paths)} for name, paths in SHAPES.items() if name.startswith("chain")
    }
    if method in LOOKUPS:
        return chains | MERGED
    static = {name: {"speculative_token_tree": str(paths)} for name, paths in SHAPES.items() if name not in chains}
    depths = {name: len(paths[-1]) for name, paths in SHAPES.items()}
    depths |= {name: wishes["num_speculative_tokens"] for name, wishes in GROWN.items()}
    every = chains | static | GROWN
    return {name: wishes for name, wishes in every.items() if not heads or depths[name] <= heads}


def answer(llm: LLM, prompts: list[list[int]], temperature: float, tokens: int) -> tuple[float, Any, SpeculationStats]:
    """Answer the prompts one at a time -> tokens per second, the answers' ids, counts of the steps."""
    start, made, counts = time.perf_counter(), [], []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, detokenize=False)
        [output] = llm.generate([prompt], params)
        made.append(list(output.outputs[0].token_ids))
        counts.append(output.speculation)
    return sum(map(len, made)) / (time.perf_counter() - start), made, SpeculationStats.total(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("demo", "assistant"))
    parser.add_argument("--method", default="eagle3", choices=("eagle3", "medusa", *LOOKUPS), help="medusa: demo only")
    parser.add_argument("--backend", default="eager", choices=("eager", "auto"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *GROWN, *MERGED], help="default: all that there are")
    args = parser.parse_args()
    if args.model == "assistant" and args.method == "medusa":
        parser.error("the assistant has no Medusa heads")

    wishes: dict[str, Any] = {"method": args.method, **LOOKUPS.get(args.method, {})}
    if args.method not in LOOKUPS:
        own = str(HERE / args.method)
        wishes["model"] = own if args.model == "demo" else (speculation_of("eagle3", 1) or {})["model"]
    checkpoint = TARGET if args.model == "demo" else model_folder()
    limits: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 1024, "backend": args.backend}
    every = shapes_for(args.method, 0 if args.method != "medusa" else 5)  # the demo's Medusa heads
    shapes = [name for name in args.shapes or every if name in every]
    rows: dict[tuple[str, float], list[float]] = {}
    lengths: dict[tuple[str, float], SpeculationStats] = {}
    different: set[str] = set()
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name in ("plain", *shapes):
            wish = None if name == "plain" else {**wishes, **every[name]}
            llm = LLM(checkpoint, wish, generation_config="off", enable_prefix_caching=False, **limits)
            engines[name] = stack.enter_context(llm)
        num_rows = {name: 1 + llm.engine.loop.input_builder.max_draft_len for name, llm in engines.items()}
        tokenizer = engines["plain"].tokenizer
        assert tokenizer is not None
        asked = [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(min(args.prompts, len(PROMPTS)))]
        prompts = asked if args.model == "demo" else prompts_of("HumanEval", tokenizer, args.prompts)
        for repeat in range(args.repeats + 1):
            print(f"repeat {repeat} of {args.repeats}", file=sys.stderr, flush=True)
            names = list(engines)
            random.Random(repeat).shuffle(names)
            for temperature in (0.0, 0.8):
                texts = {}
                for name in names:
                    speed, texts[name], counts = answer(engines[name], prompts, temperature, args.max_tokens)
                    lengths[name, temperature] = counts
                    if repeat:
                        rows.setdefault((name, temperature), []).append(speed)
                different |= {name for name in names if texts[name] != texts["plain"]}

    print("| shape | rows | greedy: accepted length | speed-up | T = 0.8: accepted length | speed-up |")
    print("|---|---|---|---|---|---|")
    for name in shapes:
        cells = [str(num_rows[name])]
        for temperature in (0.0, 0.8):
            pairs = zip(rows[name, temperature], rows["plain", temperature], strict=True)
            cells += [f"{lengths[name, temperature].acceptance_length:.2f}"]
            cells += [f"{statistics.median(own / plain for own, plain in pairs):.2f}x"]
        print(f"| {name} | {' | '.join(cells)} |")
    facts = {"kernels": load_plugins().get("cpu", "reference"), **origin("benchmarks/trees.py", sys.argv[1:])}
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    for name in sorted(different):
        print(f"the text of {name} differs from plain decoding: that is a bug", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
