"""Run AOTInductor graphs (.pt2), with the weights outside them, once for all graphs of a step.

backends/aoti/compile.py makes the graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtspec.backends.aoti.package import Run, load_graph, loading, unpack
from trtspec.backends.compiled import CONSTANTS, WEIGHTS, Block, CompiledExecutable, Graph, LoadedGraph
from trtspec.backends.graph_io import INPUTS, layer_inputs
from trtspec.backends.weight_file import load_weight_file
from trtspec.core import StepInputs
from trtspec.kv.memory import keep_freed_memory
from trtspec.methods.tree import TreeTables
from trtspec.ops import GraphUse, kernel_threads, open_row, packed_embedding, runs_graphs

_ALONE = 2**15  # elements that torch copies in the calling thread, without waking others


def load_constants(folder: Path) -> dict[str, Tensor]:
    """Load every constant of the graphs in a folder: name -> tensor."""
    weights = load_weight_file(folder / WEIGHTS)
    return weights | load_weight_file(folder / CONSTANTS, weights)


class AotiExecutable(CompiledExecutable):
    """AOTInductor graphs on the CPU: whole graphs, or a sequence of a lookup, blocks of layers and an epilogue."""

    def _load(self, folder: Path) -> Mapping[Graph, Run]:
        keep_freed_memory()
        self._weights = load_constants(folder)  # graphs point into this memory
        tree = self.compiled.tree if self.compiled.blocks else None
        self._tree = None if tree is None else TreeTables.of(tree)
        self._last_ancestors: tuple[Tensor, int, int, Tensor] | None = None
        if self.compiled.blocks:
            self._layers = self._load_layers(folder)
        load = self._load_cut if self.compiled.blocks else self._load_whole
        return {graph: load(folder, graph) for graph in self.compiled.graphs}

    def _checked(self, inputs: StepInputs) -> tuple[LoadedGraph, list[Tensor]]:
        """Check and choose as the base class does, after the nodes of trees got their places for graphs of layers."""
        if self._tree is not None:
            inputs = self._tree.with_ancestors(inputs, self._ancestors(self._tree, inputs))
        return super()._checked(inputs)

    def _ancestors(self, tree: TreeTables, inputs: StepInputs) -> Tensor:
        """Return tree.ancestors(inputs), those of the last launch if neither the tree nor the rows changed."""
        starts, contexts, K = inputs.attn.cu_q_lens, inputs.spec.num_contexts, inputs.spec.runtime_draft_len
        last = self._last_ancestors
        if last is not None and last[0] is starts and last[1:3] == (contexts, K):
            return last[3]
        ancestors = tree.ancestors(inputs)
        self._last_ancestors = None if tree.is_dynamic else (starts, contexts, K, ancestors)
        return ancestors

    def _load_whole(self, folder: Path, graph: Graph) -> Run:
        return load_graph(folder / graph.file, self._weights, self._flat_kv)

    def _load_layers(self, folder: Path) -> Run:
        """Return a function that runs all blocks: x, tensors of layer_inputs -> residual streams from the blocks."""
        if (row := self._open_row(folder)) is not None:
            return row
        runs = [
            load_graph(folder / block.file, self._weights, self._kv_of(block), name_of=block.whole_name)
            for block in self.compiled.blocks
        ]

        def run(tensors: list[Tensor]) -> list[Tensor]:
            x, *shared = tensors
            streams: list[Tensor] = []
            for block in runs:
                streams += block([x, *shared])
                x = streams[-1]
            return streams

        return run

    def _open_row(self, folder: Path) -> Run | None:
        """Return the same function through the kernels' library, at less cost; None if that is not possible."""
        if not runs_graphs():
            return None
        files = [folder / block.file for block in self.compiled.blocks]
        with loading(*files), tempfile.TemporaryDirectory(prefix="trtspec-") as scratch:
            unpacked = {file: unpack(file, Path(scratch)) for file in set(files)}
            uses = [
                GraphUse(library, self._constant_of(block), self._kv_of(block))
                for file, block in zip(files, self.compiled.blocks, strict=True)
                if (library := unpacked[file]) is not None
            ]
            return open_row(uses) if len(uses) == len(files) else None

    def _constant_of(self, block: Block) -> Callable[[str], Tensor]:
        return lambda name: self._weights[block.whole_name(name)]

    def _kv_of(self, block: Block) -> Sequence[Tensor]:
        return self._flat_kv[2 * block.first : 2 * (block.first + block.count)]  # k and v of each layer

    def _load_cut(self, folder: Path, graph: Graph) -> Run:
        """Return a function that runs the lookup, the blocks of layers and the epilogue, one after the other."""
        lookup, layers, read = self._lookup(), self._layers, self.compiled.read_layers
        last = self.compiled.blocks[-1]
        first = last.first + last.count if self.compiled.tree is None else 0  # a tree's KV is moved in all layers
        epilogue = load_graph(folder / graph.file, self._weights, self._flat_kv[2 * first :])
        ids = graph.inputs.index("input_ids")
        rows = [graph.inputs.index(name) for name in layer_inputs(graph.inputs)]
        alone = [name for name in graph.inputs if INPUTS[name].taker in ("layers", "layers of trees")]
        assert graph.inputs[: len(alone)] == tuple(alone)
        after = slice(len(alone), None)
        ends = [block.first + block.count - 1 for block in self.compiled.blocks]
        places = [ends.index(layer) for layer in read] if set(read) <= set(ends) else read  # else all streams exist

        def run(tensors: list[Tensor]) -> list[Tensor]:
            streams = layers([lookup(tensors[ids]), *(tensors[i] for i in rows)])
            return epilogue([*tensors[after], *(streams[i] for i in places)])

        return run

    def _lookup(self) -> Callable[[Tensor], Tensor]:
        """Return a function that looks up token ids [T] -> x [T, H]."""
        names, weights, none = self.compiled.lookup, self._weights, torch.empty(0)
        assert names is not None
        weight, dtype, size = weights[names.weight], self.kv[0][0].dtype, names.in_features
        scales, zeros = (weights.get(name, none) for name in (names.scales, names.zeros))
        table, few = weights.get(names.read_as), _ALONE // weight.shape[-1]

        def look_up(ids: Tensor) -> Tensor:
            if table is not None:
                ids = table[ids]
            if size:
                return packed_embedding(ids, weight, scales, zeros, size).to(dtype)
            if len(ids) <= few:
                return torch.embedding(weight, ids)
            with kernel_threads():
                return torch.embedding(weight, ids)

        return look_up
