"""Compiled graphs that the CPU kernels' library runs in sequence, without Python in between, and their memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trtspec.ops.dispatch import has_op


@dataclass(frozen=True)
class GraphUse:
    """A graph together with its own weights.

    library: the .so that AOTInductor compiled.
    constant: returns the graph's constant of a name, in the shape and dtype of its export, on memory that the caller
    keeps.
    memory: inputs that follow those of each run, which the graph may write: k and v of each of its layers, in kv.pool's
    shapes.
    """

    library: Path
    constant: Callable[[str], Tensor]
    memory: Sequence[Tensor]


class Lent:
    """A set of constants as a graph gets them: tensors of its own on the memory of others.

    AOTInductor never releases a tensor that it gets as a user-managed constant, so the memory would stay until the
    process ends. These tensors are emptied once `borrower`, which runs the graph, is gone.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def lend(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the memory of `tensor`, in its shape and dtype."""
        storage, place = tensor.untyped_storage(), tensor.storage_offset()
        lent = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # no view: a view would keep its base
        lent.set_(storage, place, tensor.shape, tensor.stride())
        self._tensors.append(lent)
        return lent

    def until_gone(self, borrower: object) -> None:
        """Take back all lent tensors once no reference to `borrower` is left."""
        # not at exit, when a thread may still run the graph
        weakref.finalize(borrower, self.take_back).atexit = False  # type: ignore[misc]

    def take_back(self) -> None:
        """Empty all lent tensors. The graph must not run again.

        The garbage collector may call this while torch.export traces another model, which must not see it.
        """
        with _disable_current_modes():
            for tensor in self._tensors:
                tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device).untyped_storage())


def runs_graphs() -> bool:
    """Whether kernels that can run graphs have loaded."""
    return has_op("trtspec_graphs", "run_graphs")


def open_row(uses: Sequence[GraphUse]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function that runs the graphs in sequence.

    The function takes the first graph's x [T, H] and the tensors that every graph takes after x. It returns the outputs
    of all graphs, in order. The last output of a graph is the x of the next one.
    The libraries' files are no longer needed once this returns. RuntimeError: a graph could not be loaded, or failed.
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
    with _disable_current_modes():  # as in Lent.take_back
        for number in numbers:
            torch.ops.trtspec_graphs.close_graph(number)
