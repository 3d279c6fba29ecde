"""Run ONNX graphs on ONNX Runtime's CPU provider, in fp32.

The graphs are the same as TensorRT's, with bodies for our ops (functions.py). The backend also works where there is no
C++ compiler. compile.py describes the content of a folder.

Each cache is bound to the same memory as input and as output. A graph's new cache is the old one with the step's rows
written. ONNX Runtime's ScatterND copies nothing if both are one buffer. A draft layer that runs several times writes
its cache several times. The states in between are made outputs, too, and bound to the same memory.

Memory: ONNX Runtime repacks the matrices of each graph that it loads, separately. EAGLE3 with one K has two graphs and
so holds the matrices twice. Each further K of a schedule of draft lengths adds two more copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from trtspec.backends.compiled import WEIGHTS, CompiledExecutable, Graph
from trtspec.backends.onnx.functions import with_bodies
from trtspec.core import StepInputs, StepOutputs
from trtspec.errors import CheckpointError, DependencyError

_OLDEST = (1, 22)
"""Oldest version of ONNX Runtime whose MatMulNBits takes 8 bits."""

_NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


class OnnxExecutable(CompiledExecutable):
    """A CompiledExecutable that runs ONNX graphs in ONNX Runtime."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run a step. Logits are returned only for a batch with constraints, as ONNX Runtime's outputs are copied."""
        for bound in self._bound:
            bound.gives_logits = inputs.spec.constraints is not None
        return super().run(inputs)

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < _OLDEST:
            raise DependencyError(
                f"backend onnx needs onnxruntime {'.'.join(map(str, _OLDEST))} or newer, this is "
                f"{onnxruntime.__version__}: pip install --upgrade 'trtspec[onnx]'"
            )
        loaded = {graph: self._load_graph(folder, graph) for graph in self.compiled.graphs}
        self._bound = list(loaded.values())
        return {graph: bound.run for graph, bound in loaded.items()}

    def _load_graph(self, folder: Path, graph: Graph) -> _BoundGraph:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        # Each graph has its own threads. They must not spin while another graph runs or the host works.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # The file may be a link, for example in a download cache. ONNX Runtime follows no link out of its folder.
        weights = (folder / WEIGHTS).resolve()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights.parent))
        try:
            model = onnx.load(folder / graph.file, load_external_data=False)
            caches = name_caches(model)
            _read_weights_from(model, weights.name)
            model = with_bodies(model)
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises its own types, a damaged file others
            raise CheckpointError(f"{folder / graph.file} cannot be loaded ({error}); rebuild the engine") from error
        if len(set(caches.values())) != len(self._flat_kv):
            raise CheckpointError(
                f"{folder / graph.file} has {len(set(caches.values()))} caches, config.json says {len(self._flat_kv)}; "
                "rebuild the engine"
            )
        return _BoundGraph(session, graph, self.compiled.outputs, caches, self._flat_kv)


_CACHES = {"SpecAttention": {3: 1, 4: 2}, "KvCompact": {0: 0, 1: 1}, "ScatterND": {0: 0}}
"""Op -> {index of the input that may be a cache: index of the output that is then the new cache}."""


def name_caches(model: onnx.ModelProto) -> dict[str, str]:
    """Map the name of each state of each cache to the graph's input that is its first state, inputs included.

    The model is changed: states in between become outputs of the graph, so that they can be bound to memory.

    All states of a cache may share memory. If a state has a next state, the rows of the next state depend on the
    results of all nodes that read the first. So these nodes have read it before the next state is written.
    """
    graph = model.graph
    known = {value.name: value for value in graph.output}
    caches = {value.name: value for value in graph.input if "_cache_" in value.name}
    states = {name: name for name in caches}
    for node in graph.node:
        for before, after in _CACHES.get(node.op_type, {}).items():
            if node.input[before] not in states:
                continue
            name = node.output[after]
            states[name] = states[node.input[before]]
            if name not in known:
                graph.output.add(name=name, type=caches[states[name]].type)
    return states


def _read_weights_from(model: onnx.ModelProto, file_name: str) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = file_name


class _BoundGraph:
    """A session of ONNX Runtime whose caches stay bound to memory."""

    def __init__(
        self, session: Any, graph: Graph, outputs: tuple[str, ...], caches: dict[str, str], flat_kv: list[Tensor]
    ) -> None:
        """Bind the caches. caches: the result of name_caches."""
        self.session = session
        self.inputs = graph.inputs
        self.outputs = outputs
        self.gives_logits = True  # False: they have no elements
        self.binding = session.io_binding()
        memory = {f"{'kv'[i % 2]}_cache_{i // 2}": tensor for i, tensor in enumerate(flat_kv)}
        for state, name in caches.items():
            tensor = memory[name]
            bind = self.binding.bind_input if state == name else self.binding.bind_output
            bind(state, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the graph: graph.inputs -> the step's outputs. It changes the bound caches."""
        binding = self.binding
        for name, tensor in zip(self.inputs, tensors, strict=True):
            binding.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name in self.outputs:
            binding.bind_output(name, "cpu")  # again, so that the last shape is forgotten
        self.session.run_with_iobinding(binding)
        results = binding.get_outputs()[-len(self.outputs) :]  # in the order in which they were first bound
        return [
            torch.from_numpy(result.numpy()) if name != "logits" or self.gives_logits else torch.empty(0)
            for name, result in zip(self.outputs, results, strict=True)
        ]
