"""Engines in turns step by step: the time of a token in whole batches, over that of plain decoding.

The machine's speed drifts within seconds, so whole runs in turns do not see the same machine. Here each engine runs one
step, then the next engine does. A step in which a request begins or ends does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec import LLM, SamplingParams
from trtspec.engine.request import Request


@dataclass
class Contestant:
    """An engine and its figures. seconds, tokens: of all steps that count. host: seconds of each outside launches."""

    llm: LLM
    seconds: float = 0.0
    tokens: int = 0
    host: list[float] = field(default_factory=list)

    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
        """Queue the prompts and return their requests."""
        return [request for prompt in prompts for request in self.llm.engine.add_request(prompt, params)]

    def step(self, batch: int) -> bool:
        """Run a step, and count it if `batch` requests generate and none ends. False: there is nothing to do."""
        engine = self.llm.engine
        if not engine.has_work:
            return False
        launched, start = self._in_launches, time.perf_counter()
        emissions = engine.step()
        seconds = time.perf_counter() - start
        if len(emissions) == batch and not any(one.is_context or one.finished for one in emissions):
            self.seconds += seconds
            self.tokens += sum(len(one.tokens) for one in emissions)
            self.host.append(seconds - (self._in_launches - launched))
        return True

    @property
    def _in_launches(self) -> float:
        return sum(one.seconds for one in self.llm.engine.executables)


def run_turns(
    engines: Mapping[str, LLM], asked: Sequence[Sequence[int]], batch: int, max_tokens: int, repeats: int,
    report: Callable[[str], None],
) -> tuple[list[dict[str, Any]], set[str]]:  # fmt: skip
    """Decode `batch` prompts greedily in all engines -> rows, and the names of engines whose text is not plain's.

    The first engine decodes plainly. A row has an engine's time of a token, all steps together, over the first one's,
    and the median milliseconds of a step outside launches.
    """
    contestants = {name: Contestant(llm) for name, llm in engines.items()}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    different: set[str] = set()
    for repeat in range(repeats):
        report(f"{batch} at a time, round {repeat + 1} of {repeats}")
        prompts = [asked[(repeat * batch + i) % len(asked)] for i in range(batch)]
        requests = {name: one.begin(prompts, params) for name, one in contestants.items()}
        while sum(one.step(batch) for one in contestants.values()):  # not any(), which leaves out turns
            pass
        texts = {name: [one.tokens for one in own] for name, own in requests.items()}
        plain = next(iter(texts.values()))
        different |= {name for name, own in texts.items() if own != plain}
    first = next(iter(contestants.values()))
    rows = [
        {
            "batch": batch,
            "engine": name,
            "token_over_plain": one.seconds / one.tokens / (first.seconds / first.tokens),
            "host_ms": 1e3 * statistics.median(one.host),
            "steps": len(one.host),
        }
        for name, one in contestants.items()
    ]
    return rows, different
