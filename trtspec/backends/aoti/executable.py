"""Run AOTInductor graphs (.pt2) with the weights outside them, once for all graphs of a step. backends/aoti/compile.py
makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trtspec.backends.compiled import WEIGHTS, CompiledExecutable, Graph
from trtspec.backends.weight_file import load_weights


class AotiExecutable(CompiledExecutable):
    """See compiled.CompiledExecutable."""

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        self._weights = load_weights(folder / WEIGHTS)  # the graphs point into these
        return {graph: self._load_graph(folder / graph.file) for graph in self.compiled.graphs}

    def _load_graph(self, file: Path) -> Callable[[list[Tensor]], list[Tensor]]:
        # not torch._inductor.aoti_load_package: importing that module, which is for compiling, takes two seconds
        model = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
        constants = {name: self._weights[name] for name in model.get_constant_fqns()}
        model.load_constants(constants, False, True, True)  # all of them, user-managed: the graph keeps our memory
        return lambda tensors: model.run([*tensors, *self._flat_kv])
