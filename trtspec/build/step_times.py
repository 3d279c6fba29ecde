"""Measure how long the steps of an engine take, which decides how many drafts it uses (engine/draft_length.py)."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trtspec.core import StepOutputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduled
from trtspec.engine.step_costs import Cell, StepCosts
from trtspec.errors import CheckpointError
from trtspec.kv.blocks import SequenceKV
from trtspec.ops import load_plugins
from trtspec.protocols import Drafter, DraftRequest, Executable
from trtspec.sampling_params import RequestSampling, SamplingParams

FILE = "step_times.json"
"""Name of the file, in an engine folder, that keeps the measured times."""
CONTEXT = 256  # tokens of each request, if the model and the cache have room for twice as many
ROUNDS = 5  # rounds with a step of each kind, after a first round that is not counted ...
ENOUGH = 0.5  # seconds for each kind on the average, after which no more rounds begin
SECONDS = 20.0  # after which no more batches are measured; the smallest and the largest always are
KEPT = 8  # tables that a file has at most, one for each machine and sizes


def step_costs(
    target: Executable,
    drafter: Drafter | None,
    builder: InputBuilder,
    makes: Sequence[int],
    max_batch_size: int,
    num_blocks: int,
    block_size: int,
    max_seq_len: int,
    folder: Path | None,
) -> StepCosts:
    """Return the times that the engine's folder keeps for this machine and these sizes, else measure and keep them.

    drafter: runs a draft model after the launch; None = the launch makes the drafts, or they are looked up.
    builder: its max_draft_len is the most drafts of a request.
    makes: numbers of drafts that are made, ascending; (0,) if they are looked up.
    max_batch_size: requests. num_blocks: KV blocks of the cache, all unused as yet. block_size, max_seq_len: tokens.
    folder: None = the times are not kept.
    """
    context = max(min(CONTEXT, max_seq_len // 2, (num_blocks - 1) * block_size // 2), 1)
    facts = {
        "machine": platform.node(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "kernels": load_plugins(),
        "libraries": sorted(Path(name).name for name in torch.ops.loaded_libraries),  # the name has a digest
        "makes": list(makes),
        "most": builder.max_draft_len,
        "max_batch_size": max_batch_size,
        "context": context,
    }
    file = None if folder is None else folder / FILE
    tables = [] if file is None else _read(file)
    for table in tables:
        if table["facts"] == facts:
            with suppress(CheckpointError):
                return StepCosts.from_json(table["cells"])
    costs = _measure(target, drafter, builder, makes, _batches(max_batch_size), num_blocks, block_size, context)
    if file is not None:
        others = [table for table in tables if table["facts"] != facts][: KEPT - 1]
        part = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # measured again at the next start
            part.write_text(json.dumps([{"facts": facts, "cells": costs.to_json()}, *others]), encoding="utf-8")
            os.replace(part, file)
    return costs


def _read(file: Path) -> list[dict[str, Any]]:
    """The tables of a file, the latest first; none if the file is missing or damaged."""
    try:
        tables = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    whole = isinstance(tables, list) and all(
        isinstance(one, dict) and {"facts", "cells"} <= one.keys() for one in tables
    )
    return tables if whole else []


def _cpu() -> str:
    """Name of the CPU; "" if the operating system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())


def _batches(largest: int) -> list[int]:
    """Batch sizes to measure, in that order: the ends first, then the powers of two from the middle outwards."""
    powers = [1 << i for i in range(1, largest.bit_length()) if 1 << i < largest]
    middle = len(powers) // 2
    return list(dict.fromkeys([1, largest, *sorted(powers, key=lambda size: abs(powers.index(size) - middle))]))


def _measure(
    target: Executable,
    drafter: Drafter | None,
    builder: InputBuilder,
    makes: Sequence[int],
    batches: Sequence[int],
    num_blocks: int,
    block_size: int,
    context: int,
) -> StepCosts:
    start = time.perf_counter()
    cells: list[Cell] = []
    for batch in batches:
        if len({cell.batch for cell in cells}) >= 2 and time.perf_counter() - start > SECONDS:
            break
        steps: dict[tuple[int, int], Callable[[], None]] = {}
        for made, length in _kinds(makes, builder.max_draft_len):
            requests = [_request(b, context, length, num_blocks, block_size) for b in range(batch)]
            rows = tuple(Scheduled(request, length + 1, length, False) for request in requests)

            def step(rows: Batch = rows, made: int = made, length: int = length) -> None:
                outputs = target.run(builder.build(rows, made))
                if drafter is not None and made:
                    drafter.propose(_questions(rows, outputs, made, length))

            steps[made, length] = step
        fastest = zip(steps, _fastest(list(steps.values())), strict=True)
        cells += [Cell(made, batch, length, seconds) for (made, length), seconds in fastest]
    return StepCosts(cells)


def _fastest(steps: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each step: of the fastest of a few rounds. They take turns, so slow moments of the machine hit all."""
    rounds: list[list[float]] = []
    while len(rounds) < 2 or (len(rounds) <= ROUNDS and sum(map(sum, rounds[1:])) < ENOUGH * len(steps)):
        rounds.append([])
        for step in steps:
            began = time.perf_counter()
            step()
            rounds[-1].append(time.perf_counter() - began)
    return [min(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _questions(rows: Batch, outputs: StepOutputs, made: int, verified: int) -> list[DraftRequest]:
    """Return the questions to a drafter after a step that accepted half of its drafts.

    The draft model has not read the tokens that the step added. A model that reads no states has two left to read.
    """
    read, states, questions = 1 + verified // 2, outputs.hidden_states, []
    for b, (request, num_rows, _, _) in enumerate(rows):
        end = len(request.tokens)
        questions.append(
            DraftRequest(
                request_id=request.request_id,
                tokens=request.tokens,
                max_draft_len=made,
                sampling=request.sampling,
                block_table=request.kv.blocks,
                draft_kv_len=max(end - 1 - (1 if states is None else read), 0),
                hidden_states=None if states is None else states[b * num_rows :][: min(read, end - 1)],
                prompt_len=request.prompt_len,
            )
        )
    return questions


def _kinds(makes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(drafts made, drafts verified of each request) of the steps to measure."""
    if len(makes) == 1:
        return [(0, length) for length in sorted({0, *(n for n in (1, 2, 3, 5, 8, 12, 16, 24) if n < most), most})]
    return [(made, length) for made in makes for length in makes if length <= made]


def _request(index: int, context: int, drafts: int, num_blocks: int, block_size: int) -> Request:
    """A generation with `context` tokens, which verifies drafts. Where blocks are few, requests share them."""
    per_request = -(-(context + 2 * drafts + 2) // block_size)
    blocks = [1 + (index * per_request + i) % (num_blocks - 1) for i in range(per_request)]
    return Request(
        request_id=index,
        tokens=[0] * context,
        prompt_len=1,
        sampling=RequestSampling.of(SamplingParams(temperature=0.0), 0, 1, (), {}),
        length_limit=context + drafts + 1,
        min_tokens=0,
        eos_ids=frozenset(),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
        kv=SequenceKV(blocks, committed=context - 1, draft_kv_len=context - 1),
        drafts=[0] * drafts,
    )
