"""Compiled graphs: run in a row by the CPU kernels' library, without Python between them; and what they keep."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtspec.ops.dispatch import has_op


@dataclass(frozen=True)
class GraphUse:
    """A graph on its own weights.

    library: what AOTInductor compiled, an .so. constant: the graph's constant of a name, of the shape and dtype that it
    was exported with, on memory that the caller keeps. memory: inputs that follow those of each run, which the graph
    may write: k and v of each of its layers, of kv.pool's shapes.
    """

    library: Path
    constant: Callable[[str], Tensor]
    memory: Sequence[Tensor]


class Lent:
    """Constants as a graph is given them: tensors of its own on the memory of others.

    AOTInductor never lets go of a tensor that it is given as a user-managed constant, so the memory would stay until
    the process ends. These are emptied once `borrower`, which runs the graph, is gone.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def lend(self, tensor: Tensor) -> Tensor:
        """On the memory of `tensor`, in its shape and dtype."""
        storage, place = tensor.untyped_storage(), tensor.storage_offset()
        lent = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # not a view, which would keep what it is of
        lent.set_(storage, place, tensor.shape, tensor.stride())
        self._tensors.append(lent)
        return lent

    def until_gone(self, borrower: object) -> None:
        """What was lent is taken back when nobody has `borrower` any more."""
        # not at exit, when a thread may still run it
        weakref.finalize(borrower, self.take_back).atexit = False  # type: ignore[misc]

    def take_back(self) -> None:
        """Empty what was lent. The graph must not run again."""
        for tensor in self._tensors:
            tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device).untyped_storage())


def runs_graphs() -> bool:
    """Whether kernels that can do it have loaded."""
    return has_op("trtspec_graphs", "run_graphs")


def open_row(uses: Sequence[GraphUse]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that runs them in a row.

    It takes the first graph's x [T, H] and the tensors that all of them take after it, and returns what all of them
    give, in order: the last that a graph gives is the next one's x. The libraries' files are no longer needed then.
    RuntimeError: one could not be loaded, or failed.
    """
    ops, numbers, lent = torch.ops.trtspec_graphs, [], Lent()
    names = {library: ops.graph_constants(str(library)) for library in {use.library for use in uses}}
    try:
        for use in uses:
            constants = [lent.lend(use.constant(name)) for name in names[use.library]]
            numbers.append(ops.open_graph(str(use.library), constants, list(use.memory)))
    except BaseException:
        _close(numbers)
        lent.take_back()
        raise
    run = functools.partial(ops.run_graphs.default, numbers)
    lent.until_gone(run)
    weakref.finalize(run, _close, numbers)
    return run


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        torch.ops.trtspec_graphs.close_graph(number)
