"""Compiled graphs run in a row by the CPU kernels' library: without Python between them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphUse:
    """A graph on its own weights. library: what AOTInductor compiled. constant: the graph's, by the name that the graph
    has for it, on memory that the caller keeps. memory: inputs that follow those of each run."""

    library: Path
    constant: Callable[[str], Tensor]
    memory: Sequence[Tensor]


def runs_graphs() -> bool:
    """Whether kernels that can do it have loaded."""
    return hasattr(torch.ops.trtspec_graphs, "run_graphs")


def open_row(uses: Sequence[GraphUse]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that runs them in a row: the first of its tensors goes to the first graph and the last that a graph
    gives to the next one, the others go to all. It returns what all of them give. The libraries' files are no longer
    needed then. RuntimeError: one could not be loaded."""
    ops, numbers = torch.ops.trtspec_graphs, []
    names = {library: ops.graph_constants(str(library)) for library in {use.library for use in uses}}
    try:
        for use in uses:
            constants = [use.constant(name) for name in names[use.library]]
            numbers.append(ops.open_graph(str(use.library), constants, list(use.memory)))
    except BaseException:
        _close(numbers)
        raise
    run = functools.partial(ops.run_graphs.default, numbers)
    weakref.finalize(run, _close, numbers)
    return run


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        torch.ops.trtspec_graphs.close_graph(number)
