"""Measurement of decoding: tokens per second next to plain decoding and next to this machine's own limit."""

from __future__ import annotations

import math
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trtspec
from trtspec.errors import RequestError
from trtspec.llm import LLM
from trtspec.outputs import SpeculationStats, or_none
from trtspec.sampling_params import SamplingParams


def read_bandwidth(num_bytes: int = 2**28, repeats: int = 5) -> float:
    """Bytes per second that this machine reads from memory with torch's threads.

    The value is the median over sums of a large tensor.
    """
    data = torch.ones(num_bytes // 4)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times[1:])


@dataclass
class DecodeRun:
    """A record of the steps of one repeat in which every request was generating. Times in seconds."""

    tokens: int = 0
    step_times: list[float] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)  # step times outside Executable.run
    bytes_read: int = 0  # of weights, by all launches of these steps
    outputs: list[list[int]] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / sum(self.step_times) if self.step_times else math.nan


def decode_once(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> DecodeRun:
    """Generate for all prompts as one batch, and time the pure generation steps."""
    engine, run = llm.engine, DecodeRun()
    samples = [engine.add_request(prompt, params)[0] for prompt in prompts]
    while engine.has_work:
        before = sum(executable.seconds for executable in engine.executables)
        read = sum(executable.bytes_read for executable in engine.executables)
        start = time.perf_counter()
        emissions = engine.step()
        elapsed = time.perf_counter() - start
        if emissions and not any(emission.is_context for emission in emissions):
            run.tokens += sum(len(emission.tokens) for emission in emissions)
            run.step_times.append(elapsed)
            run.host_times.append(elapsed - sum(executable.seconds for executable in engine.executables) + before)
            run.bytes_read += sum(executable.bytes_read for executable in engine.executables) - read
    run.outputs = [sample.output_ids for sample in samples]
    run.speculation = SpeculationStats.total(sample.stats for sample in samples)
    return run


def greedy(output_len: int) -> SamplingParams:
    """Return the sampling of runs whose generation steps are timed. RequestError unless there is such a step."""
    if output_len < 2:
        raise RequestError(f"output_len = {output_len} times no step, as the prompt's gives a token; give 2 or more")
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def bench_decode(
    model: str | Path,
    speculative_config: Any,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda message: None,
    against: str | Path | None = None,
    **engine_options: Any,
) -> dict[str, Any]:
    """Measure greedy decoding of the prompts (token ids) as one batch, in turn with a model to compare with.

    The other model is `against`, a checkpoint or engine folder. Without `against`, a run with a speculative_config is
    compared with plain decoding of the same model.

    Returns a JSON-ready dict of the settings and these results:
    - tok_s: tokens per second of pure generation steps, median of the repeats. plain_tok_s: the same for the other
      model.
    - speedup: median of the ratios of both, repeat by repeat. Without another model, it and plain_tok_s are None.
    - lossless: whether the outputs are equal; None without another model.
    - acceptance_length: mean tokens per step that had drafts; None if no step had drafts.
    - tokens_per_step (of all generation steps); acceptance_per_position; weight_bytes_per_step.
    - read_gbs: 10^9 bytes/s that the machine reads, probed between the repeats.
    - roofline_ratio: time to read the weights / step time.
    - host_us_per_step: median of a step's wall time outside Executable.run.
    - load_s, first_token_s: seconds from the start of the constructor. They include the time to compile where a
      checkpoint starts for the first time.
    - peak_rss_bytes; versions.
    """
    params = greedy(output_len)
    options = {"max_batch_size": max(len(prompts), 1), **engine_options}
    progress("loading; a checkpoint is compiled at its first start")
    start = time.perf_counter()
    llm = LLM(model, speculative_config, **options)
    load_s = time.perf_counter() - start
    next(iter(llm.stream(list(prompts[0]), params)))
    first_token_s = time.perf_counter() - start
    other = model if against is None and speculative_config is not None else against
    plain = None if other is None else LLM(other, **options)

    runs, plain_runs, bandwidths = [], [], []
    for repeat in range(repeats + 1):  # the first is a warm-up
        progress(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        runs.append(decode_once(llm, prompts, params))
        if plain is not None:
            plain_runs.append(decode_once(plain, prompts, params))
        bandwidths.append(read_bandwidth())
    runs, plain_runs, bandwidths = runs[1:], plain_runs[1:], bandwidths[1:]

    step_s = statistics.median(time for run in runs for time in run.step_times)
    bytes_per_step = sum(run.bytes_read for run in runs) / sum(len(run.step_times) for run in runs)
    bandwidth = statistics.median(bandwidths)
    speculation = runs[0].speculation
    result = {
        "model": str(model),
        "speculation": None if speculative_config is None else str(speculative_config),
        "against": None if against is None else str(against),
        "batch": len(prompts),
        "input_len": [len(prompt) for prompt in prompts],
        "output_len": output_len,
        "tok_s": statistics.median(run.tokens_per_second for run in runs),
        "plain_tok_s": None,
        "speedup": None,
        "lossless": None,
        "acceptance_length": or_none(speculation.acceptance_length),
        "tokens_per_step": or_none(speculation.tokens_per_step),
        "acceptance_per_position": speculation.acceptance_per_position,
        "weight_bytes_per_step": round(bytes_per_step),
        "read_gbs": bandwidth / 1e9,
        "roofline_ratio": bytes_per_step / bandwidth / step_s,
        "host_us_per_step": 1e6 * statistics.median(time for run in runs for time in run.host_times),
        "load_s": load_s,
        "first_token_s": first_token_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": versions(),
    }
    if plain is not None:
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs, plain_runs, strict=True)]
        result["plain_tok_s"] = statistics.median(run.tokens_per_second for run in plain_runs)
        result["speedup"] = statistics.median(ratios)
        result["lossless"] = all(a.outputs == b.outputs for a, b in zip(runs, plain_runs, strict=True))
    return result


def versions() -> dict[str, str | int]:
    """Return the versions and machine properties that the figures depend on."""
    return {
        "trtspec": trtspec.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
