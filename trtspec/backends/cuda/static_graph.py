"""Memory of CUDA graphs: where a graph reads its inputs and writes its outputs, on the device and on the host.

A graph works on the same memory every time. Its inputs lie next to each other in one region of device memory, and one
copy brings all of them there. Its outputs lie in a second region, and one copy takes all of them away. Graphs that
never run at the same time share both regions. The host has two regions for inputs and two for outputs, which alternate:
one is for the launch in flight, the other for the next launch.

Logits are too large for a region. They have memory of their own on the device, which all graphs share too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from trtspec.backends.cuda.device import WorkQueue
from trtspec.backends.graph_io import INPUTS, GraphInput, User
from trtspec.core import SamplingTensors
from trtspec.errors import CapacityError

logger = logging.getLogger(__name__)

CARRY = {
    "carry_tokens": GraphInput("carry_tokens", ("T",), torch.int64, fill=-1),
    "carry_kept": GraphInput("carry_kept", ("B",), torch.int64, fill=-1),
}
"""Inputs of CUDA graphs in addition to the step's: the fields of carry.Carry."""

_ROWS = {**INPUTS, **CARRY}
BAN_COLUMNS = 8  # in a graph that has bans; batches with more bans run kernel by kernel
_ALIGNMENT = 16  # bytes that kernels load at once

Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""

Kind = frozenset[User | Literal["logits", "masks"]]
"""Sampling options that a graph has inputs for. An option without inputs costs no kernels.

"logits": the graph also returns logits. "masks": it takes masks of the tokens that may be drawn. No graph takes other
logit constraints: batches with penalties or biases run kernel by kernel.
"""
MASKS = "allow_mask"
"""Input that graphs with "masks" take."""

EVERY_KIND: Kind = frozenset(("sampled", "filtered", "bans"))
_OPTIONAL = [(row.name, row.user) for row in INPUTS.values() if row.user in EVERY_KIND]


def kind_of(sampling: SamplingTensors) -> Kind:
    """Kind of a graph that takes no more inputs than such rows use."""
    return frozenset(user for name, user in _OPTIONAL if getattr(sampling, name).numel())


def leaves_out(kind: Kind, name: str) -> bool:
    """Whether graphs of a kind leave out an input."""
    user = "masks" if name == MASKS else _ROWS[name].user
    return user != "" and user not in kind


def left_out(kind: Kind, names: Iterable[str], rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return empty tensors for those of the inputs that graphs of a kind leave out."""
    return {name: _ROWS[name].left_out(rows, device) for name in names if leaves_out(kind, name)}


class Region:
    """Layout of named tensors in one region of memory, so that one copy moves all of them."""

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
        """Return the layout of those inputs that graphs of a kind take. sizes: sizes of their dims, by name."""
        rows = [_ROWS[name] for name in names if not leaves_out(kind, name)]
        return cls({row.name: (row.shape(sizes), cast("torch.dtype", row.dtype)) for row in rows})

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of `memory` [nbytes or more] uint8."""
        return {
            name: memory[self.starts[name] :][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in self.parts.items()
        }


@dataclass(frozen=True)
class StaticGraph:
    """A captured graph: views of its inputs and outputs in the host's regions, and the function that replays it.

    large: outputs that have no place in the regions, on the device.
    """

    width: int  # rows per request
    in_bytes: int
    out_bytes: int
    staged: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    host_outputs: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    large: Mapping[str, Tensor]
    replay: Callable[[], None]


class CapturedGraphs(dict[Hashable, StaticGraph]):
    """Captured graphs, by what tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self._too_large: set[Hashable] = set()

    def at_first_use(self, key: Hashable, capture: Callable[[], StaticGraph]) -> StaticGraph | None:
        """Return a graph, captured if it is new; None, from then on, if the device's memory did not suffice for it."""
        if key not in self and key not in self._too_large:
            try:
                self[key] = capture()
            except CapacityError as error:
                self._too_large.add(key)
                logger.warning("steps of one more kind run kernel by kernel, without a CUDA graph: %s", error)
        return self.get(key)


class GraphMemory:
    """Memory that graphs share.

    in_bytes and out_bytes: the largest size of a graph's inputs and outputs. most_rows: the most rows of a large
    output. The first graph that has the output allocates its memory.
    """

    def __init__(self, work: WorkQueue, in_bytes: int, out_bytes: int, most_rows: int = 0) -> None:
        self._work, self._most_rows = work, most_rows
        self._large: dict[str, Tensor] = {}
        self._staging, self._readback = ([work.pinned(size) for _ in range(2)] for size in (in_bytes, out_bytes))
        self._slot = 0
        self._inputs_there, self._outputs_there = (
            torch.zeros(size, dtype=torch.uint8, device=work.device) for size in (in_bytes, out_bytes)
        )

    def capture(
        self, inputs: Region, outputs: Region, width: int, step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    ) -> StaticGraph:
        """Capture `step`, a function of inputs on the device -> outputs on the device. Others than `outputs` are large.

        The step runs on padding alone, which changes nothing but scratch. No launch is in flight meanwhile.
        """
        self._work.mark().wait()
        staged = inputs.views(self._staging[0]), inputs.views(self._staging[1])
        host_outputs = outputs.views(self._readback[0]), outputs.views(self._readback[1])
        there, given = inputs.views(self._inputs_there), outputs.views(self._outputs_there)

        def bring() -> None:
            self._inputs_there[: inputs.nbytes].copy_(self._staging[0][: inputs.nbytes])

        large: dict[str, Tensor] = {}

        def run() -> None:
            for name, tensor in step(there).items():
                if name in given:
                    given[name].copy_(tensor)
                else:
                    large[name] = self._shared(name, tensor).copy_(tensor)

        _fill(staged[0], width, {})
        self._work.submit(bring)
        replay = self._work.capture(run)
        self._work.mark().wait()
        return StaticGraph(width, inputs.nbytes, outputs.nbytes, staged, host_outputs, large, replay)

    def _shared(self, name: str, like: Tensor) -> Tensor:
        """Return the shared memory of a large output, with the shape of `like`."""
        if name not in self._large:  # so in a run before a capture: what a capture allocates is its graph's alone
            self._large[name] = like.new_empty(self._most_rows, *like.shape[1:])
        return self._large[name][: len(like)]

    def replay(
        self, graph: StaticGraph, tensors: Mapping[str, Tensor], copies: dict[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Queue the graph for these inputs and return views of its outputs in host memory, with padding after them.

        The outputs are there when the graph is done, and stay until the replay after the next. copies: gets copies of
        large outputs, in host memory.
        """
        slot = self._slot = 1 - self._slot
        _fill(graph.staged[slot], graph.width, tensors)
        staging, readback = self._staging[slot][: graph.in_bytes], self._readback[slot][: graph.out_bytes]

        def work() -> None:
            self._inputs_there[: graph.in_bytes].copy_(staging, non_blocking=True)
            graph.replay()
            readback.copy_(self._outputs_there[: graph.out_bytes], non_blocking=True)
            if copies is not None:
                copies.update((name, self._work.to_host(tensor)) for name, tensor in graph.large.items())

        self._work.submit(work)
        return graph.host_outputs[slot]


def _fill(views: Mapping[str, Tensor], width: int, tensors: Mapping[str, Tensor]) -> None:
    """Copy inputs of requests with `width` rows each into a graph's inputs, and fill the rest with padding."""
    for name, view in views.items():
        fill = _ROWS[name].fill
        padding = width if fill is None else fill
        source = tensors.get(name)
        count = 0 if source is None else len(source)
        if source is not None and source.ndim == 2:
            columns = min(source.shape[1], view.shape[1])  # the other columns of a table are scratch
            view[:count, :columns] = source[:, :columns]
            view[:count, columns:] = padding
        elif source is not None:
            view[:count] = source
        if count < len(view):
            view[count:] = padding
