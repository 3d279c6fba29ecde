"""Structured outputs: what drafts from the grammar save, alone and with drafters, on 100 requests with JSON schemas.

    python benchmarks/grammar.py
    python benchmarks/grammar.py --methods grammar ngram eagle3 --backend eager --requests 20

SmolLM2-135M-Instruct answers, greedily and at temperature 0.8. All engines answer each request, in turns. The table has
medians of ratios over the requests. "speed-up" is in tokens per second against plain decoding, which is guided too.
"tokens a step" counts every step after the prompt, with drafts or without. "unguided" is without a schema. "step"
compares the times of steps that verify K drafts, guided and not. Answers are checked: equal to plain decoding's, and
valid unless they were too long to end.
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

import jsonschema

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.peers.notes import origin
from benchmarks.real.ours import speculation_of
from benchmarks.schemas import requests
from examples.smollm2.__main__ import model_folder
from trtspec import LLM, SamplingParams, StructuredOutputs
from trtspec.ops import load_plugins
from trtspec.outputs import SpeculationStats

TEMPERATURES = (0.0, 0.8)
FREE, FREE_TOKENS = 8, 64
"""Requests that are answered without their schema, too, and the length of these answers."""


@dataclass
class Run:
    """An engine's answers at one temperature. steps: median seconds of those that verified K drafts, by request."""

    ids: list[list[int]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens per second, by request
    steps: list[float | None] = field(default_factory=list)  # None: the request had no such step
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_ended: int = 0

    def answer(self, llm: LLM, prompt: list[int], params: SamplingParams) -> str:
        """Answer one request -> the text of an answer that ended, else ""."""
        engine = llm.engine
        K = engine.loop.input_builder.max_draft_len
        [request] = engine.add_request(prompt, params)
        steps: list[float] = []
        begin = time.perf_counter()
        while engine.has_work:
            start = time.perf_counter()
            for emission in engine.step():
                if emission.draft_len == K and not emission.is_context:
                    steps.append(time.perf_counter() - start)
        if request.error is not None:
            raise request.error
        self.speeds.append(len(request.output_ids) / (time.perf_counter() - begin))
        self.steps.append(statistics.median(steps) if steps else None)
        self.ids.append(request.output_ids)
        self.stats = SpeculationStats.total((self.stats, request.stats))
        self.num_ended += request.finish_reason == "stop"
        return request.shown_text if request.finish_reason == "stop" else ""


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of the schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def methods(wanted: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """The speculative_config of each contestant, by its name."""
    every: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "grammar": {"method": "grammar"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": speculation_of("suffix", 8),
        "eagle3": speculation_of("eagle3", 3),
        "eagle3, K = 5": speculation_of("eagle3", 5),
    }
    return {name: wish for name, wish in every.items() if name == "plain" or name.split(",")[0] in wanted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("grammar", "ngram", "suffix", "eagle3")
    parser.add_argument("--methods", nargs="+", default=names, choices=names)
    parser.add_argument("--backend", default="auto", choices=("eager", "auto"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="raw rows")
    args = parser.parse_args()
    checkpoint = model_folder()
    limits: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 512, "backend": args.backend}
    chosen = requests(args.requests)
    wrong: list[str] = []
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name, wish in methods(args.methods).items():
            print(f"loading {name}", file=sys.stderr, flush=True)
            llm = LLM(checkpoint, wish, generation_config="off", enable_prefix_caching=False, **limits)
            engines[name] = stack.enter_context(llm)
        tokenizer = engines["plain"].tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.encode_chat([{"role": "user", "content": words}]) for words, _ in chosen]
        for temperature in TEMPERATURES:
            guided, free = {name: Run() for name in engines}, {name: Run() for name in engines}
            for i, (prompt, (_, schema)) in enumerate(zip(prompts, chosen, strict=True)):
                print(f"T = {temperature}: request {i + 1} of {len(prompts)}", file=sys.stderr, flush=True)
                common: dict[str, Any] = {"temperature": temperature, "seed": i, "max_tokens": args.max_tokens}
                asked = SamplingParams(structured_outputs=StructuredOutputs(json=schema), **common)
                names = list(engines)
                random.Random(i).shuffle(names)
                for name in names:
                    text = guided[name].answer(engines[name], prompt, asked)
                    if text and not valid(text, schema):
                        wrong.append(f"request {i} of {name}: {text!r} does not match its schema: that is a bug")
                    if i < FREE:
                        unguided = SamplingParams(ignore_eos=True, **{**common, "max_tokens": FREE_TOKENS})
                        free[name].answer(engines[name], prompt, unguided)
            for name in engines:
                if guided[name].ids != guided["plain"].ids:
                    wrong.append(f"the text of {name} differs from plain decoding: that is a bug")
                speeds = zip(guided[name].speeds, guided["plain"].speeds, strict=True)
                pairs = [(own, other) for own, other in zip(guided[name].steps, free[name].steps, strict=False)]
                ratios = [own / other for own, other in pairs if own and other]
                rows.append(
                    {
                        "method": name,
                        "temperature": temperature,
                        "tokens_per_step": guided[name].stats.tokens_per_step,
                        "speed_up": statistics.median(own / plain for own, plain in speeds),
                        "unguided_tokens_per_step": free[name].stats.tokens_per_step,
                        "step_ratio": statistics.median(ratios) if ratios else None,
                        "ended": guided[name].num_ended,
                    }
                )
    print("| drafts | T | tokens a step | speed-up | tokens a step, unguided | step: guided / unguided | ended |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        step = "" if row["step_ratio"] is None else f"{row['step_ratio']:.2f}x"
        print(
            f"| {row['method']} | {row['temperature']} | {row['tokens_per_step']:.2f} | {row['speed_up']:.2f}x | "
            f"{row['unguided_tokens_per_step']:.2f} | {step} | {row['ended']} of {len(chosen)} |"
        )
    facts = {"kernels": load_plugins().get("cpu", "reference"), **origin("benchmarks/grammar.py", sys.argv[1:])}
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    if args.json:
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
