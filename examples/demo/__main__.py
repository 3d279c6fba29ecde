"""The main job: the same text, faster. Run as `make demo` or `python -m examples.demo`.

A pretrained assistant, which is downloaded once (see examples/smollm2), answers questions. Without a network, or with
--tiny, the shipped small models continue code.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from examples.demo.engines import ASSISTANT_K, K, built, speculation_of, target_of
from examples.smollm2.__main__ import model_folder
from trtspec import LLM, SamplingParams, SpeculationStats
from trtspec.cli.generate import stream_coloured
from trtspec.errors import TrtSpecError
from trtspec.ops.dispatch import load_plugins


def ngram(num_drafts: int | str) -> dict[str, Any]:
    """speculative_config of lookups in the request's own tokens."""
    return {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def suffix(num_drafts: int | str) -> dict[str, Any]:
    """speculative_config of lookups by suffixes. They skip answers of earlier rounds, as those are the same."""
    return {"method": "suffix", "num_speculative_tokens": num_drafts, "suffix_decoding_max_cached_requests": 0}


MODES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "plain"),
    "ngram": ("n-gram", "plain", ngram(K)),
    "draft": ("draft model", "draft"),
    "medusa": ("Medusa", "medusa"),
    "mtp": ("MTP", "mtp"),
    "eagle3": ("EAGLE3", "eagle3"),
}
"""Modes of the shipped models: name for --modes -> arguments of Mode."""
PROMPTS = (
    'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n        self.items = []\n\n    def',
    "import os\nimport sys\nimport unittest\n\n\nclass TestPath(unittest.TestCase):\n    def setUp(self):",
    'def parse_args(argv):\n    """Parse the command line."""\n    parser = argparse.ArgumentParser(',
    "def read_config(filename):\n    try:\n        with open(filename) as f:\n",
)
ASSISTANT_MODES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "assistant"),
    "ngram": ("n-gram", "assistant", ngram(ASSISTANT_K)),
    "suffix": ("suffix", "assistant", suffix(ASSISTANT_K)),
    "eagle3": ("EAGLE3", "assistant-eagle3"),
    "eagle3+lookup": ("EAGLE3+lookup", "assistant-eagle3", {"sa_config": {}}),
}
TREE = ("EAGLE3 tree", "assistant-tree")
"""EAGLE3's mode where the CPU multiplies bf16 by itself. A tree's rows cost too much elsewhere."""
QUESTIONS = (
    "Write a Python function that counts how often each word occurs in a file, and explain how it works.",
    "What are the phases of the moon, and why do they occur?",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "How do I make a paper aeroplane? Give me the steps.",
)


@dataclass(frozen=True)
class Show:
    """The contents of a demo.

    chat: whether prompts are questions, and answers end where the model ends them. streamed: number of answers that are
    streamed; the first one by n-grams if there is still an engine to compile.
    """

    modes: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]]
    prompts: tuple[str, ...]
    num_drafts: int | str
    chat: bool
    max_tokens: int
    temperature: float
    rounds: int
    streamed: int


TINY = Show(MODES, PROMPTS, K, chat=False, max_tokens=96, temperature=0.8, rounds=5, streamed=4)
ASSISTANT = Show(
    ASSISTANT_MODES, QUESTIONS, ASSISTANT_K, chat=True, max_tokens=192, temperature=0.0, rounds=3, streamed=2
)


@dataclass
class Mode:
    """A way to decode, with its results."""

    name: str
    engine: str  # name of the engine that runs it (engines.py)
    speculative_config: dict[str, Any] | None = None  # in addition to what the engine was built for
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt
    times: list[list[float]] = field(default_factory=list)  # of each prompt, seconds in each round
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / sum(map(statistics.median, self.times))


def main() -> int:
    start = time.perf_counter()
    names = list(dict.fromkeys([*ASSISTANT_MODES, *MODES]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped models; nothing is downloaded")
    parser.add_argument("--max-tokens", type=int, help="tokens generated per prompt, at most")
    parser.add_argument("--temperature", type=float, help="0 = greedy (default 0; of --tiny 0.8)")
    parser.add_argument("--modes", nargs="+", choices=names, default=names, help="next to plain (default: all)")
    parser.add_argument("--backend", choices=("aoti", "eager"), default="aoti", help="compiled engines, or op by op")
    args = parser.parse_args()
    console = Console()
    show = TINY if args.tiny else _assistant(console)
    modes = [Mode(*of) for name, of in show.modes.items() if name == "plain" or name in args.modes]
    temperature = show.temperature if args.temperature is None else args.temperature
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=args.max_tokens or show.max_tokens, ignore_eos=not show.chat
    )
    stage = Stage(show, params, console, start)
    try:
        engines = _compiled(modes, stage) if args.backend == "aoti" else _op_by_op(modes)
    except TrtSpecError as error:
        console.print(str(error), style="bold red")
        return 1
    prompts = [_prompt(engines[0], show, prompt) for prompt in show.prompts]
    for llm in engines:  # the first run pays for threads and code paths
        llm.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    stage.tell("ready")
    stage.stream(engines[-1], modes[-1].name, show.streamed)

    with console.status("the modes take turns"):
        _measure(modes, engines, prompts, params, show.rounds)
    console.print(table(modes, _title(show, temperature)))
    lossless = all(mode.tokens == modes[0].tokens for mode in modes)
    if not lossless:
        console.print("the output of some mode differs from plain decoding: that is a bug", style="bold red")
    return 0 if lossless else 1


def _assistant(console: Console) -> Show:
    """Return the assistant's demo, or that of the shipped models if the assistant is not available, and say why."""
    try:
        with console.status("SmolLM2-135M-Instruct (90 MB, downloaded once)"):
            model_folder()
    except (TrtSpecError, OSError) as error:
        console.print(f"the assistant is not here: {error}. The shipped models are shown instead.", style="yellow")
        return TINY
    if load_plugins().get("cpu") not in ("avx512_bf16", "amx"):
        return ASSISTANT
    return dataclasses.replace(ASSISTANT, modes={**ASSISTANT.modes, "eagle3": TREE})


@dataclass
class Stage:
    """Where answers are streamed. start: time at which the demo began. streamed: number of answers so far."""

    show: Show
    params: SamplingParams
    console: Console
    start: float
    streamed: int = 0

    def tell(self, what: str) -> None:
        self.console.print(f"{what} after {time.perf_counter() - self.start:.0f} s", style="dim", highlight=False)

    def stream(self, llm: LLM, name: str, until: int) -> None:
        """Stream the next answers, until there are `until` of them in all. name: of the mode."""
        show, console = self.show, self.console
        console.print(Rule(f"{name}: what it guessed and the target accepted is green"))
        for text in show.prompts[self.streamed : until]:
            style, end = ("bold", "\n") if show.chat else ("dim", "")
            console.print(text, style=style, end=end, highlight=False, markup=False)
            stream_coloured(llm, _prompt(llm, show, text), self.params, console)
            console.print(Rule(style="dim"))
        self.streamed = max(self.streamed, until)


def _compiled(modes: list[Mode], stage: Stage) -> list[LLM]:
    """Return an engine for each mode, compiled if it is missing.

    If others are still being compiled when plain decoding's is ready, that one streams the first answer.
    """
    names = list(dict.fromkeys(mode.engine for mode in modes))
    folders: dict[str, Path] = {}
    for name, folder, missing in built(names, stage.console):
        folders[name] = folder
        if name == modes[0].engine and missing:
            with LLM(folder, ngram(K), max_batch_size=1) as llm:
                stage.tell("the first answer begins")
                stage.stream(llm, "n-gram", 1)
    return [LLM(folders[mode.engine], mode.speculative_config, max_batch_size=1) for mode in modes]


def _op_by_op(modes: list[Mode]) -> list[LLM]:
    """Return an engine for each mode that runs its checkpoint op by op."""
    settings = [{**(speculation_of(mode.engine) or {}), **(mode.speculative_config or {})} for mode in modes]
    return [
        LLM(target_of(mode.engine), config or None, backend="eager", max_batch_size=1)
        for mode, config in zip(modes, settings, strict=True)
    ]


def _prompt(llm: LLM, show: Show, text: str) -> str | list[int]:
    """Return the prompt as `llm` takes it: a question in the model's chat template, as token ids."""
    if not show.chat:
        return text
    assert llm.tokenizer is not None
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def _measure(modes: list[Mode], engines: list[LLM], prompts: list[Any], params: SamplingParams, rounds: int) -> None:
    """Run the modes in turn, so that a slow moment of the machine affects all."""
    for prompt in prompts:
        times = [[0.0] * rounds for _ in modes]
        for turn in range(rounds):
            outputs = []
            for own, llm in zip(times, engines, strict=True):
                start = time.perf_counter()
                outputs.append(llm.generate(prompt, params, use_tqdm=False)[0])
                own[turn] = time.perf_counter() - start
        for mode, own, output in zip(modes, times, outputs, strict=True):
            mode.times.append(own)
            mode.tokens.append(list(output.outputs[0].token_ids))
            mode.stats = SpeculationStats.total((mode.stats, output.speculation))


def _title(show: Show, temperature: float) -> str:
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}, seeded"
    what = "questions" if show.chat else "prompts"
    return f"{len(show.prompts)} {what}, one at a time, K = {show.num_drafts}, {sampling}"


def table(modes: list[Mode], title: str) -> Table:
    """One row per mode; the speed-up is relative to the first."""
    grid = Table(title=title)
    headings = ("tok/s", "speed-up", "tokens\n/step", "acceptance\nlength", "accepted\nat 1, 2, 3", "equals\nplain")
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
            percentages(mode.stats.acceptance_per_position[:3]),
            "yes" if mode.tokens == plain.tokens else "NO",
        )
    return grid


def percentages(shares: list[float]) -> str:
    """Fractions as text: "92 91 91 %"."""
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else "-"


if __name__ == "__main__":
    sys.exit(main())
