"""Run AOTInductor graphs (.pt2) with the weights outside them, once for all graphs of a step. backends/aoti/compile.py
makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtspec.backends.compiled import WEIGHTS, CompiledExecutable, Graph
from trtspec.backends.weight_file import load_weights


class AotiExecutable(CompiledExecutable):
    """See compiled.CompiledExecutable."""

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        self._weights = load_weights(folder / WEIGHTS)  # the graphs point into these
        return {graph: load_graph(folder / graph.file, self._weights, self._flat_kv) for graph in self.compiled.graphs}


def load_graph(
    file: Path, weights: Mapping[str, Tensor], kv: Sequence[Tensor], alone: bool = False, device: int = -1
) -> Callable[[list[Tensor]], list[Tensor]]:
    """The graph in `file`, on the memory of `weights`, which the caller keeps. It takes the tensors before the caches
    `kv`. alone: without the events that guard it against other threads, which a CUDA graph would not take. device:
    index of the GPU, -1 = the current one, or the CPU."""
    # not torch._inductor.aoti_load_package: importing that module, which is for compiling, takes two seconds
    model = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", alone, 1, device)
    constants = {name: weights[name] for name in model.get_constant_fqns()}
    model.load_constants(constants, False, True, True)  # all of them, user-managed: the graph keeps our memory
    return lambda tensors: model.run([*tensors, *kv])
