"""Whole generation steps of an engine on the GPU: when each ran, and the bytes that one must move."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.card import Card, TimedQueue, seconds
from benchmarks.gpu.checkpoints import ITEM_BYTES
from benchmarks.peers.checkpoints import Shape
from trtspec import LLM, SamplingParams
from trtspec.engine.core import EngineCore
from trtspec.engine.steady import SteadyLoop

INPUT_LEN = 128
MAX_SEQ_LEN = 1024
_WARM_UPS = 12  # steps that only generate, before those that count
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)


def step_bytes(weight_bytes: int, shape: Shape, batch: int, context: float, rows: int, drafts: int) -> float:
    """Least number of bytes that a generation step moves, read and written.

    weight_bytes: bytes of weights, each counted as often as it is read. context: tokens in the KV cache of each request
    before the step. rows: number of rows of each request, whose KV is written. drafts: number of passes of a head of
    one layer; the first pass has all rows, the others one. Every pass reads the cache once. Activations are not
    counted.
    """
    layer = 2 * ITEM_BYTES * shape.kv_heads * shape.head_dim * batch  # bytes of K and V of a token of each request
    head = layer * (drafts * context + rows + drafts - 1) if drafts else 0
    return weight_bytes + shape.layers * layer * (context + rows) + head


@dataclass
class Steps:
    """Consecutive generation steps of one batch. Times are in seconds."""

    device: list[float]  # of each step on the device, from its first copy to its last
    gaps: list[float]  # on the device, between two steps
    walls: list[float]
    tokens: int
    context: float  # mean number of tokens in the KV cache of a request before a step

    @property
    def step(self) -> float:
        """Median time of a step on the device."""
        return statistics.median(self.device)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / sum(self.walls)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by a share of the values of at least `share`."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


class Opened:
    """An engine on the GPU, stepped by the caller's thread."""

    def __init__(self, folder: Path, speculation: dict[str, Any] | None, max_batch_size: int, card: Card) -> None:
        self.card = card
        self.llm = LLM(
            folder,
            speculation,
            backend="cuda",
            max_batch_size=max_batch_size,
            max_seq_len=MAX_SEQ_LEN,
            enable_prefix_caching=False,
            generation_config="off",
            force_num_accepted_tokens=None if speculation is None else 0,
        )
        self.engine: EngineCore = self.llm.engine
        (executable,) = self.engine.executables
        self.weight_bytes = executable.weight_bytes
        graphs: Any = executable.inner
        self.queue = TimedQueue(graphs._work, card)  # graphs are captured already, so the queue sees launches only
        graphs._work = graphs._memory._work = self.queue
        self._loop = self.engine.loop

    def force(self, accepted: int) -> None:
        """Set the number of drafts that count as accepted in each step of later requests."""
        self.engine.loop.input_builder.forced_accept = accepted

    def overlap(self, wanted: bool) -> None:
        """Set whether the host prepares a step while the last one runs. Call it only while nothing is in flight."""
        alone = {field.name: getattr(self._loop, field.name) for field in fields(SteadyLoop) if field.init}
        self.engine.loop = self._loop if wanted else SteadyLoop(**alone)

    def steps(self, prompts: Sequence[list[int]], params: SamplingParams, draft_len: int, count: int) -> Steps:
        """Run the prompts together and time `count` steps, in which every request verifies `draft_len` drafts."""
        engine = self.engine
        samples = [engine.add_request(prompt, params)[0] for prompt in prompts]
        given = warm = 0
        while warm < _WARM_UPS:
            if not engine.has_work:
                raise RuntimeError(f"no request is left: {samples[0].error or 'the sequences are too short'}")
            emissions = engine.step()
            given += sum(len(emission.tokens) for emission in emissions)
            warm += len(emissions) == len(samples) and not any(emission.is_context for emission in emissions)
        self.queue.launches.clear()
        walls: list[float] = []
        tokens: list[int] = []
        for _ in range(count):
            start = time.perf_counter()
            emissions = engine.step()
            walls.append(time.perf_counter() - start)
            if [emission.draft_len for emission in emissions] != [draft_len] * len(samples):
                raise RuntimeError(f"a step of other than {len(samples)} requests with {draft_len} drafts each")
            tokens.append(sum(len(emission.tokens) for emission in emissions))
        launches = self.queue.launches[:count]
        for sample in samples:
            engine.abort(sample.request_id)
        while engine.has_work:  # until what is in flight has landed
            engine.step()
        self.card.synchronize()
        between = [(last, first) for (_, last), (first, _) in itertools.pairwise(launches)]
        before = [given + done for done in itertools.accumulate(tokens, initial=0)][:-1]  # tokens of all requests
        context = INPUT_LEN - 1 + statistics.fmean(before) / len(samples)
        return Steps(seconds(launches), seconds(between), walls, sum(tokens), context)

    def close(self) -> None:
        """Free the GPU. Nothing else of this object may be used afterwards."""
        self.llm.shutdown()
        del self.llm, self.engine, self.queue, self._loop
        gc.collect()
        self.card.release()


def random_prompts(shape: Shape, count: int) -> list[list[int]]:
    """Prompts of INPUT_LEN random ids each."""
    generator = torch.Generator().manual_seed(count)
    ids: list[list[int]] = torch.randint(shape.vocab, (count, INPUT_LEN), generator=generator).tolist()
    return ids
