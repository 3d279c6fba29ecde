"""Speed of num_speculative_tokens = "auto" next to plain decoding and fixed numbers, while text and load change."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.bench.decode import versions
from trtspec.config.speculative import AUTO_DRAFT_LEN
from trtspec.engine.request import Request
from trtspec.errors import RequestError
from trtspec.llm import LLM
from trtspec.sampling_params import SamplingParams

PLAIN, AGAIN, AUTO = "plain", "plain again", "auto"
"""Names of engines. AGAIN is a second engine of plain decoding: how far it is from PLAIN is noise."""


@dataclass
class Load:
    """A part of the trace: so many clients, each of which asks again as soon as it has an answer.

    speeds: tokens per second by engine, for each repeat, prompts included. drafts_per_token: drafts that AUTO verified
    for each token, for each repeat.
    """

    clients: int
    temperature: float
    speeds: dict[str, list[float]] = field(default_factory=dict)
    drafts_per_token: list[float] = field(default_factory=list)

    def ratios(self, name: str, base: str) -> list[float]:
        """Speeds of one engine over those of another, repeat by repeat."""
        return [own / other for own, other in zip(self.speeds[name], self.speeds[base], strict=True)]


def run_load(llm: LLM, load: Load, prompts: Sequence[Sequence[int]], output_len: int) -> tuple[float, list[Request]]:
    """Answer all prompts, as many at once as there are clients.

    Returns the tokens per second, prompts included, and the requests. Raises the error of a request that failed.
    """
    engine = llm.engine
    waiting = list(enumerate(prompts))[::-1]
    requests: list[Request] = []
    running = 0
    start = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and running < load.clients:
            seed, prompt = waiting.pop()
            params = SamplingParams(
                temperature=load.temperature, seed=seed, max_tokens=output_len, ignore_eos=True, detokenize=False
            )
            requests += engine.add_request(prompt, params)
            running += 1
        running -= sum(emission.finished for emission in engine.step())
    seconds = time.perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
    return sum(len(request.output_ids) for request in requests) / seconds, requests


def run_trace(
    engines: Mapping[str, LLM],
    loads: Sequence[Load],
    prompts: Sequence[Sequence[int]],
    output_len: int,
    repeats: int,
    progress: Callable[[str], None] = lambda message: None,
) -> set[str]:
    """Run the trace on each engine in turn, in each repeat in another order. The first run warms up.

    prompts: answered in each load, from the first on; every client has as many of them. Speeds are added to `loads`.
    Returns the names of engines whose text was not that of PLAIN.
    """
    answers = len(prompts) // max(load.clients for load in loads)
    different: set[str] = set()
    for repeat in range(repeats + 1):
        progress(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        names = list(engines)
        random.Random(repeat).shuffle(names)
        texts: dict[str, list[list[int]]] = {name: [] for name in names}
        for name in names:
            for load in loads:
                speed, requests = run_load(engines[name], load, prompts[: load.clients * answers], output_len)
                texts[name] += [request.output_ids for request in requests]
                if repeat:
                    load.speeds.setdefault(name, []).append(speed)
                if repeat and name == AUTO:
                    drafts = sum(request.stats.num_draft_tokens for request in requests)
                    load.drafts_per_token.append(drafts / sum(len(request.output_ids) for request in requests))
        different |= {name for name in names if texts[name] != texts[PLAIN]}
    return different


def summary(load: Load, fixed: Sequence[str], others: Sequence[str] = ()) -> dict[str, Any]:
    """Medians over the repeats.

    fixed: names of the engines with a fixed number of drafts. others: further names, whose speed-ups are wanted. The
    dict has the load's clients and temperature, and:
    - plain_tok_s: tokens per second of plain decoding.
    - speedups: of each other engine, the ratio to plain decoding.
    - auto_over_best: ratio to the best fixed number, 0 included.
    - null: lower quartile of plain decoding's ratio to plain decoding; None with one repeat.
    - drafts_per_token: drafts that "auto" verified for each token.
    """
    best = max((PLAIN, *fixed), key=lambda name: statistics.median(load.speeds[name]))
    null = load.ratios(AGAIN, PLAIN)
    return {
        "clients": load.clients,
        "temperature": load.temperature,
        "plain_tok_s": statistics.median(load.speeds[PLAIN]),
        "speedups": {name: statistics.median(load.ratios(name, PLAIN)) for name in (*fixed, AUTO, *others)},
        "auto_over_best": statistics.median(load.ratios(AUTO, best)),
        "null": statistics.quantiles(null, n=4, method="inclusive")[0] if len(null) > 1 else None,
        "drafts_per_token": statistics.median(load.drafts_per_token),
    }


def bench_adaptive(
    model: str | Path,
    speculative_config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clients: Sequence[int] = (1, 8, 1),
    temperatures: Sequence[float] = (0.0, 1.0),
    fixed: Sequence[int] = (1, 3),
    repeats: int = 3,
    progress: Callable[[str], None] = lambda message: None,
    **engine_options: Any,
) -> dict[str, Any]:
    """Measure "auto" in a trace: for each number of clients, a load at each temperature. No engine is restarted.

    The speculative_config's own number of drafts is ignored, and so is enable_adaptive_verification. Prompts are token
    ids. Each client asks as many of them as there are for each of the most clients.

    Returns a JSON-ready dict of the settings and these results: `loads` (`summary` of each), `lossless` (whether every
    engine gave the tokens of plain decoding), `versions`. RequestError if there are fewer prompts than clients.
    """
    if len(prompts) < max(clients):
        raise RequestError(f"{len(prompts)} prompts for {max(clients)} clients; give at least one for each")
    options = {"max_batch_size": max(clients), "enable_prefix_caching": False, **engine_options}
    loads = [Load(count, temperature) for count in clients for temperature in temperatures]
    wishes: dict[str, Mapping[str, Any] | None] = {PLAIN: None, AGAIN: None}
    method = {**speculative_config, "enable_adaptive_verification": False}
    wishes |= {f"K = {K}": {**method, "num_speculative_tokens": K} for K in fixed}
    wishes[AUTO] = {**method, "num_speculative_tokens": AUTO_DRAFT_LEN}
    with ExitStack() as stack:
        engines = {}
        for name, wish in wishes.items():
            progress(f"loading {name}; a checkpoint is compiled at its first start")
            engines[name] = stack.enter_context(LLM(model, wish, **options))
        different = run_trace(engines, loads, prompts, output_len, repeats, progress)
    return {
        "model": str(model),
        "speculation": dict(speculative_config),
        "prompts": len(prompts),
        "input_len": [len(prompt) for prompt in prompts],
        "output_len": output_len,
        "repeats": repeats,
        "loads": [summary(load, [f"K = {K}" for K in fixed]) for load in loads],
        "lossless": not different,
        "versions": versions(),
    }
