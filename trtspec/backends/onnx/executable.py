"""Run ONNX graphs on ONNX Runtime's CPU provider, in fp32: the very graphs that TensorRT is given, with bodies for our
ops (functions.py), and a backend where no C++ compiler is. What is in a folder, compile.py says.

Caches are bound as input and as output, the same memory: a graph's new cache is the old one with the step's rows
written, and ONNX Runtime's ScatterND copies nothing where both are one buffer. A draft layer that runs several times
writes its cache as often; what it writes in between is made an output, too, and bound to that memory.

Memory: ONNX Runtime repacks the matrices of every graph that it loads, each for itself. With EAGLE3 and one K, two
graphs, they are held twice; a schedule of draft lengths adds two more for each K.
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
"""ONNX Runtime: the first whose MatMulNBits takes 8 bits."""

_NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


class OnnxExecutable(CompiledExecutable):
    """See compiled.CompiledExecutable."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """See protocols.Executable. What leaves ONNX Runtime is copied, so logits do only where they are asked for."""
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
        # Each graph has threads of its own: those of the last one must not spin while another runs, or the host works.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # May be a link, in a download cache say: ONNX Runtime follows none out of the folder that it is given.
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
        except Exception as error:  # ONNX Runtime raises types of its own, and a damaged file other ones
            raise CheckpointError(f"{folder / graph.file} cannot be loaded ({error}); rebuild the engine") from error
        if len(set(caches.values())) != len(self._flat_kv):
            raise CheckpointError(
                f"{folder / graph.file} has {len(set(caches.values()))} caches, config.json says {len(self._flat_kv)}; "
                "rebuild the engine"
            )
        return _BoundGraph(session, graph, self.compiled.outputs, caches, self._flat_kv)


_CACHES = {"SpecAttention": {3: 1, 4: 2}, "KvCompact": {0: 0, 1: 1}, "ScatterND": {0: 0}}
"""Op -> which input is the cache before, if it is one, and which output the cache after."""


def name_caches(model: onnx.ModelProto) -> dict[str, str]:
    """Every state of every cache -> the graph's input that it begins as, inputs included. States in between are made
    outputs of the graph, in place, so that they can be bound to memory.

    All states may share memory: what reads one has a result that the rows of the next state depend on, or there is no
    next, so it has read before they are written.
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
    """A session whose caches are bound for good."""

    def __init__(
        self, session: Any, graph: Graph, outputs: tuple[str, ...], caches: dict[str, str], flat_kv: list[Tensor]
    ) -> None:
        """caches: see name_caches."""
        self.session = session
        self.inputs = graph.inputs
        self.outputs = outputs
        self.gives_logits = True  # False: of no elements
        self.binding = session.io_binding()
        memory = {f"{'kv'[i % 2]}_cache_{i // 2}": tensor for i, tensor in enumerate(flat_kv)}
        for state, name in caches.items():
            tensor = memory[name]
            bind = self.binding.bind_input if state == name else self.binding.bind_output
            bind(state, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """graph.inputs -> the step's outputs; the bound caches are changed."""
        binding = self.binding
        for name, tensor in zip(self.inputs, tensors, strict=True):
            binding.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name in self.outputs:
            binding.bind_output(name, "cpu")  # anew: it forgets the last shape
        self.session.run_with_iobinding(binding)
        results = binding.get_outputs()[-len(self.outputs) :]  # in the order in which they were first bound
        return [
            torch.from_numpy(result.numpy()) if name != "logits" or self.gives_logits else torch.empty(0)
            for name, result in zip(self.outputs, results, strict=True)
        ]
