"""The main job, on the shipped models: the same text, faster. Run as `make demo` or `python -m examples.demo`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from examples.demo.engines import ENGINES, K, build_missing, target_of
from trtspec import LLM, SamplingParams, SpeculationStats
from trtspec.cli.generate import stream_coloured
from trtspec.errors import TrtSpecError

ROUNDS = 5
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
MODES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "plain"),
    "ngram": ("n-gram", "plain", NGRAM),
    "draft": ("draft model", "draft"),
    "medusa": ("Medusa", "medusa"),
    "mtp": ("MTP", "mtp"),
    "eagle3": ("EAGLE3", "eagle3"),
}
"""Of --modes -> what a Mode is made of."""
PROMPTS = (
    'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n        self.items = []\n\n    def',
    "import os\nimport sys\nimport unittest\n\n\nclass TestPath(unittest.TestCase):\n    def setUp(self):",
    'def parse_args(argv):\n    """Parse the command line."""\n    parser = argparse.ArgumentParser(',
    "def read_config(filename):\n    try:\n        with open(filename) as f:\n",
)


@dataclass
class Mode:
    """One way to decode, and what it did."""

    name: str
    engine: str  # that runs it; in ENGINES
    speculative_config: dict[str, Any] | None = None  # beside what the engine was built for
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt
    times: list[list[float]] = field(default_factory=list)  # of each prompt, seconds in each round
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / sum(map(statistics.median, self.times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens generated per prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = greedy (default 0.8)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="beside plain (default: all)")
    parser.add_argument("--backend", choices=("aoti", "eager"), default="aoti", help="compiled engines, or op by op")
    args = parser.parse_args()
    console = Console()
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    modes = [Mode(*MODES[name]) for name in MODES if name == "plain" or name in args.modes]
    try:
        if args.backend == "aoti":
            folders = build_missing({mode.engine: None for mode in modes}, console)
            engines = [LLM(folders[mode.engine], mode.speculative_config, max_batch_size=1) for mode in modes]
        else:
            speculation = [mode.speculative_config or ENGINES[mode.engine] for mode in modes]
            targets = [target_of(mode.engine) for mode in modes]
            options = {"backend": "eager", "max_batch_size": 1}
            engines = [LLM(target, own, **options) for target, own in zip(targets, speculation, strict=True)]
    except TrtSpecError as error:
        console.print(str(error), style="bold red")
        return 1
    for llm in engines:  # the first run pays for threads and code paths
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)

    console.print(Rule(f"{modes[-1].name}: what it guessed and the target accepted is green"))
    for prompt in PROMPTS:
        console.print(prompt, style="dim", end="", highlight=False, markup=False)
        stream_coloured(engines[-1], prompt, params, console)
        console.print(Rule(style="dim"))

    for prompt in PROMPTS:
        rounds = [[0.0] * ROUNDS for _ in modes]
        for turn in range(ROUNDS):  # every mode in turn, so that a slow moment of the machine hits all
            outputs = []
            for times, llm in zip(rounds, engines, strict=True):
                start = time.perf_counter()
                outputs.append(llm.generate(prompt, params, use_tqdm=False)[0])
                times[turn] = time.perf_counter() - start
        for mode, times, output in zip(modes, rounds, outputs, strict=True):
            mode.times.append(times)
            mode.tokens.append(list(output.outputs[0].token_ids))
            mode.stats = SpeculationStats.total((mode.stats, output.speculation))
    console.print(table(modes, "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}, seeded"))
    lossless = all(mode.tokens == modes[0].tokens for mode in modes)
    if not lossless:
        console.print("the output of some mode differs from plain decoding: that is a bug", style="bold red")
    return 0 if lossless else 1


def table(modes: list[Mode], sampling: str) -> Table:
    """One row per mode; the speed-up is against the first."""
    grid = Table(title=f"{len(PROMPTS)} prompts, one at a time, K = {K}, {sampling}")
    headings = ("tok/s", "speed-up", "tokens\n/step", "acceptance\nlength", "accepted\nat 1..K", "equals\nplain")
    for heading in ("mode", *headings):  # 80 characters wide in all
        grid.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    plain = modes[0]
    for mode in modes:
        grid.add_row(
            mode.name,
            f"{mode.tokens_per_second:.0f}",
            f"{mode.tokens_per_second / plain.tokens_per_second:.2f}x",
            f"{mode.stats.tokens_per_step:.2f}",
            f"{mode.stats.acceptance_length:.2f}" if mode.stats.num_drafts else "-",
            percentages(mode.stats.acceptance_per_position),
            "yes" if mode.tokens == plain.tokens else "NO",
        )
    return grid


def percentages(shares: list[float]) -> str:
    """Fractions as "92 91 91 %"."""
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else "-"


if __name__ == "__main__":
    sys.exit(main())
