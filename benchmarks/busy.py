"""The demo's modes while other programs use the same cores: how much of their speed and of each speed-up is left.

    python benchmarks/busy.py
    python benchmarks/busy.py --rounds 9 --busy 0 1 2

For each number of busy processes (a loop that never waits) all modes take turns, so that ratios are from the same
minutes. The first turn of each mode warms up. Tables show medians over the rounds. "kept" is a mode's share of its own
quiet speed. "speed-up" is the time of plain decoding over the mode's. Texts are checked: busy processes do not change
them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from examples.demo.__main__ import MODES, PROMPTS, Mode
from examples.demo.engines import TARGET, build_missing
from trtspec import LLM, SamplingParams
from trtspec.ops import load_plugins

BUSY = "while True: pass"


def turns(engines: dict[str, LLM], params: SamplingParams, rounds: int) -> tuple[dict[str, list[float]], set[str]]:
    """Tokens per second of each round of the modes in turn, and the modes whose text differs from plain decoding's."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    different = set()
    for turn in range(rounds + 1):
        texts = {}
        for name, llm in engines.items():
            start = time.perf_counter()
            outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
            seconds = time.perf_counter() - start
            texts[name] = [list(output.outputs[0].token_ids) for output in outputs]
            if turn > 0:
                speeds[name].append(sum(map(len, texts[name])) / seconds)
        different |= {name for name, text in texts.items() if text != texts["plain"]}
    return speeds, different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="busy processes; 0 first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    modes = {name: Mode(*of) for name, of in MODES.items()}
    folders = build_missing({mode.engine: None for mode in modes.values()}, Console(stderr=True))
    engines = {
        name: LLM(folders[mode.engine], mode.speculative_config, max_batch_size=1) for name, mode in modes.items()
    }
    engines["plain, eager"] = LLM(TARGET, backend="eager", max_batch_size=1)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    found: dict[int, dict[str, list[float]]] = {}
    different: set[str] = set()
    for count in args.busy:
        programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
        try:
            found[count], others = turns(engines, params, args.rounds)
        finally:
            for program in programs:
                program.kill()
                program.wait()
        different |= others
    print(f"{load_plugins().get('cpu', 'no kernels')}; medians of {args.rounds} rounds\n")
    heads = [f"{count} busy: tokens/s | kept | speed-up" for count in args.busy]
    print(f"| mode | {' | '.join(heads)} |")
    print(f"|---|{'---|---|---|' * len(heads)}")
    for name in engines:
        cells = []
        for count in args.busy:
            speeds, quiet, plain = (found[n][of] for n, of in ((count, name), (args.busy[0], name), (count, "plain")))
            speed = statistics.median(speeds)
            ratio = statistics.median(own / base for own, base in zip(speeds, plain, strict=True))
            cells.append(f"{speed:.0f} | {speed / statistics.median(quiet):.2f} | {ratio:.2f}x")
        print(f"| {name} | {' | '.join(cells)} |")
    for name in sorted(different - {"plain, eager"}):
        print(f"the text of {name} differs from plain decoding: that is a bug")
    return 1 if different - {"plain, eager"} else 0


if __name__ == "__main__":
    sys.exit(main())
