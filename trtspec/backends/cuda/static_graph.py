"""Work as a CUDA graph: the memory that it reads its inputs from and leaves its outputs in, on the device and the host.

A graph works on the same memory every time. Its inputs lie side by side in one region of the device's memory, to which
one copy brings all of them, and its outputs in another, from which one copy takes them. Graphs that never run at the
same time share both. On the host's side there are two regions of each that take turns, for the launch in flight and the
one after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from trtspec.backends.cuda.device import WorkQueue
from trtspec.backends.graph_io import INPUTS, GraphInput, User
from trtspec.core import SamplingTensors

CARRY = {
    "carry_tokens": GraphInput("carry_tokens", ("T",), torch.int64, fill=-1),
    "carry_kept": GraphInput("carry_kept", ("B",), torch.int64, fill=-1),
}
"""Inputs of CUDA graphs beside those of the step: core.Carry."""

_ROWS = {**INPUTS, **CARRY}
BAN_COLUMNS = 8  # of a graph, where there are any; who bans more runs kernel by kernel
_ALIGNMENT = 16  # bytes: what kernels load at once

Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors by name: shape and dtype."""

Kind = frozenset[User]
"""Sampling options that a graph has inputs for; an option that it lacks costs no kernels.

No graph has inputs for logit constraints: batches with constraints run kernel by kernel.
"""

EVERY_KIND: Kind = frozenset(("sampled", "filtered", "bans"))
_OPTIONAL = [(row.name, row.user) for row in INPUTS.values() if row.user in EVERY_KIND]


def kind_of(sampling: SamplingTensors) -> Kind:
    """Of a graph that takes no more than such rows use."""
    return frozenset(user for name, user in _OPTIONAL if getattr(sampling, name).numel())


def leaves_out(kind: Kind, name: str) -> bool:
    """Whether graphs of that kind do not take the input."""
    user = _ROWS[name].user
    return user != "" and user not in kind


def left_out(kind: Kind, names: Iterable[str], rows: int, device: torch.device) -> dict[str, Tensor]:
    """What stands for those of the inputs that graphs of that kind do not take."""
    return {name: _ROWS[name].left_out(rows, device) for name in names if leaves_out(kind, name)}


class Region:
    """Named tensors side by side, so that one copy moves all of them."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.starts: dict[str, int] = {}
        self.nbytes = 0
        for name, (shape, dtype) in parts.items():
            self.starts[name] = self.nbytes
            size = math.prod(shape) * dtype.itemsize
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of_inputs(cls, kind: Kind, names: Iterable[str], sizes: Mapping[str, int]) -> Region:
        """Those of the inputs that graphs of that kind take; sizes: of their dims, by name."""
        rows = [_ROWS[name] for name in names if not leaves_out(kind, name)]
        return cls({row.name: (row.shape(sizes), cast("torch.dtype", row.dtype)) for row in rows})

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in `memory` [nbytes or more] uint8."""
        return {
            name: memory[self.starts[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in self.parts.items()
        }


@dataclass(frozen=True)
class StaticGraph:
    """Views of its inputs and outputs in both regions of the host, and what queues it."""

    width: int  # rows of each request
    in_bytes: int
    out_bytes: int
    staged: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    host_outputs: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    replay: Callable[[], None]


class GraphMemory:
    """What graphs with up to so many bytes of inputs and outputs share."""

    def __init__(self, work: WorkQueue, in_bytes: int, out_bytes: int) -> None:
        self._work = work
        self._staging, self._readback = ([work.pinned(size) for _ in range(2)] for size in (in_bytes, out_bytes))
        self._slot = 0
        self._inputs_there, self._outputs_there = (
            torch.zeros(size, dtype=torch.uint8, device=work.device) for size in (in_bytes, out_bytes)
        )

    def capture(
        self, inputs: Region, outputs: Region, width: int, step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    ) -> StaticGraph:
        """step: inputs on the device -> outputs there. It runs with padding alone, which changes nothing but scratch.
        Nothing is in flight meanwhile."""
        self._work.mark().wait()
        staged = inputs.views(self._staging[0]), inputs.views(self._staging[1])
        host_outputs = outputs.views(self._readback[0]), outputs.views(self._readback[1])
        there, given = inputs.views(self._inputs_there), outputs.views(self._outputs_there)

        def bring() -> None:
            self._inputs_there[: inputs.nbytes].copy_(self._staging[0][: inputs.nbytes])

        def run() -> None:
            for name, tensor in step(there).items():
                given[name].copy_(tensor)

        _fill(staged[0], width, {})
        self._work.submit(bring)
        replay = self._work.capture(run)
        self._work.mark().wait()
        return StaticGraph(width, inputs.nbytes, outputs.nbytes, staged, host_outputs, replay)

    def replay(self, graph: StaticGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Queue it for these inputs. Where its outputs will be once it is done, padding behind them, until the replay
        after the next."""
        slot = self._slot = 1 - self._slot
        _fill(graph.staged[slot], graph.width, tensors)
        staging, readback = self._staging[slot][: graph.in_bytes], self._readback[slot][: graph.out_bytes]

        def work() -> None:
            self._inputs_there[: graph.in_bytes].copy_(staging, non_blocking=True)
            graph.replay()
            readback.copy_(self._outputs_there[: graph.out_bytes], non_blocking=True)

        self._work.submit(work)
        return graph.host_outputs[slot]


def _fill(views: Mapping[str, Tensor], width: int, tensors: Mapping[str, Tensor]) -> None:
    """Bring the inputs of requests with `width` rows each into a graph's, and padding behind them."""
    for name, view in views.items():
        fill = _ROWS[name].fill
        padding = width if fill is None else fill
        source = tensors.get(name)
        count = 0 if source is None else len(source)
        if source is not None and source.ndim == 2:
            columns = min(source.shape[1], view.shape[1])  # the table's others are scratch
            view[:count, :columns] = source[:, :columns]
            view[:count, columns:] = padding
        elif source is not None:
            view[:count] = source
        if count < len(view):
            view[count:] = padding
