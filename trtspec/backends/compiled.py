"""Compiled steps, whatever compiled them: what a folder holds, and what is checked before a graph is launched.

A folder has, for each K asked for, a ragged graph that verifies K drafts a request and makes K for the next step and,
if the step does both, a uniform one for batches in which all requests bring K drafts. A `CompiledStep` says what is in
it; a backend is a `CompiledExecutable` that knows how to load a graph.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtspec.backends.graph_io import INPUTS, STARTS, GraphInput, graph_reader, output_names, step_outputs
from trtspec.core import KVLayer, KVSpec, SpecMetadata, StepInputs, StepOutputs
from trtspec.errors import CheckpointError, DependencyError, EngineError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.step import Step
from trtspec.ops import kernel_interface

WEIGHTS = "weights.safetensors"
"""The file of a folder that has the constants of its graphs, each once."""
CONSTANTS = "constants.safetensors"
"""Beside WEIGHTS, where that has the decoder's weights alone and is the same file for every speculation."""


@dataclass(frozen=True)
class Block:
    """A run of layers. Blocks of one file are the same graph, each run on its own weights and KV."""

    file: str
    first: int  # layer of the decoder
    count: int

    def whole_name(self, constant: str) -> str:
        """What a constant of its graph, whose layers count from 0, is called among those of the step."""
        part, number, *rest = constant.split(".")
        return ".".join(("step.decoder", part, str(self.first + int(number)) if part == "layers" else number, *rest))


@dataclass(frozen=True)
class Lookup:
    """How token ids become the first layer's x [T, H]: names of constants. With in_features, `weight` is packed."""

    weight: str
    scales: str = ""
    zeros: str = ""
    in_features: int = 0
    read_as: str = ""  # [V] int64: the ids that are looked up; "": as they are


@dataclass(frozen=True)
class Graph:
    """One file: verifies up to `draft_len` drafts a request and makes `draft_len` for the next step. A uniform one
    takes batches of generations alone that bring that many each. Where the decoder is cut, `file` is what comes behind
    its layers."""

    file: str
    draft_len: int
    uniform: bool
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class CompiledStep:
    """What a backend compiled into a folder; plain data, written into the engine's config.json."""

    graphs: tuple[Graph, ...]  # by draft_len; for each a ragged one
    outputs: tuple[str, ...]
    kv: tuple[KVSpec, ...]
    dtype: str  # of KV
    vocab_size: int
    weight_bytes: int  # that one launch reads
    kernels: str  # ops.kernel_interface that graphs were compiled for: "" = they call torch's dispatcher
    made_for: Mapping[str, str] = field(default_factory=dict)  # what a backend's code asks for where it runs
    kv_blocks: int | None = None  # of the cache that graphs take; None: of any
    hidden_width: int = 0  # of the rows of hidden_states, in `dtype`; 0 = graphs take none
    linear: bool = False  # caches are [blocks - 1, kv heads, tokens, head size]: no scratch, a block for a sequence
    verifies_drafts: bool = False  # in the graphs: what they are given to verify has their K
    makes_drafts: bool = False  # in the graphs: as many as their K
    takes_constraints: bool = False  # of the target's logits, and gives these
    lookup: Lookup | None = None  # before the blocks
    blocks: tuple[Block, ...] = ()  # the decoder's layers in order, for all graphs; (): they are in each graph
    read_layers: tuple[int, ...] = ()  # of these, whose residual streams graphs take from the blocks

    @classmethod
    def of(
        cls,
        step: Step,
        graphs: Sequence[Graph],
        constraints: bool = False,
        kernels: str = "",
        lookup: Lookup | None = None,
        blocks: Sequence[Block] = (),
        read_layers: Sequence[int] = (),
    ) -> CompiledStep:
        """The graphs of `step`. constraints: as of graph_io.input_names."""
        return cls(
            graphs=tuple(graphs),
            outputs=output_names(step, constraints),
            kv=step.kv_layers,
            dtype=str(step.like.dtype).removeprefix("torch."),
            vocab_size=step.vocab_size,
            weight_bytes=step.weight_bytes_per_step,
            kernels=kernels,
            hidden_width=step.hidden_width,
            verifies_drafts=step.verifies_drafts,
            makes_drafts=step.makes_drafts,
            takes_constraints=constraints,
            lookup=lookup,
            blocks=tuple(blocks),
            read_layers=tuple(read_layers),
        )

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """K of the graphs, in rising order."""
        return tuple(graph.draft_len for graph in self.graphs if not graph.uniform)

    def check_kernels(self) -> None:
        """DependencyError where the kernels that graphs call are not there, CheckpointError where they are others."""
        if self.kernels and not kernel_interface():
            raise DependencyError(
                "the engine calls the C++ kernels, which are not built here; run python -m trtspec_plugins.cpu, or "
                "rebuild the engine"
            )
        if self.kernels and self.kernels != kernel_interface():
            raise CheckpointError(
                "the engine was compiled for other C++ kernels than those built here; rebuild it with trtspec build"
            )

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledStep:
        """The inverse of to_dict. CheckpointError if it is not that."""
        try:
            parts: dict[str, Any] = {
                "graphs": tuple(Graph(**{**graph, "inputs": tuple(graph["inputs"])}) for graph in data["graphs"]),
                "outputs": tuple(data["outputs"]),
                "kv": tuple(KVSpec(*layer) for layer in data["kv"]),
                "lookup": None if data["lookup"] is None else Lookup(**data["lookup"]),
                "blocks": tuple(Block(**block) for block in data["blocks"]),
                "read_layers": tuple(data["read_layers"]),
            }
            return cls(**{one.name: parts.get(one.name, data[one.name]) for one in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the engine's config.json does not describe its graphs ({error!r}); rebuild it"
            ) from error


class LoadedGraph:
    """A graph in memory and what its inputs must be. highest: values that GraphInput.values names; dtype: of the
    model."""

    def __init__(
        self,
        graph: Graph,
        run: Callable[[list[Tensor]], list[Tensor]],
        highest: Mapping[str, int],
        dtype: torch.dtype,
    ) -> None:
        self.draft_len, self.uniform, self.names, self.run = graph.draft_len, graph.uniform, graph.inputs, run
        self.read = graph_reader(graph.inputs)
        rows = [INPUTS[name] for name in graph.inputs]
        self.dtypes = [row.dtype or dtype for row in rows]
        self.optional = [(i, row) for i, row in enumerate(rows) if row.user]
        self.ranges = [(i, row.values[0], highest[row.values[1]]) for i, row in enumerate(rows) if row.values]
        self.last_shapes: list[torch.Size] = []  # of inputs that fitted


class CompiledExecutable(ABC):
    """The graphs of a compiled step and its KV layers. See protocols.Executable. A backend says how a graph is loaded.

    Raises EngineError for inputs a graph would misread; the graphs check none of them.
    """

    def __init__(self, compiled: CompiledStep, folder: Path, kv: Sequence[KVLayer]) -> None:
        self.compiled = compiled
        self.kv = kv
        self._flat_kv = [tensor for layer in kv for tensor in layer]
        shape = kv[0][0].shape
        num_blocks, block_size = (shape[0] + 1, shape[2]) if compiled.linear else shape[:2]
        highest = {"id": compiled.vocab_size - 1, "block": num_blocks - 1, "slots": num_blocks * block_size}
        dtype = kv[0][0].dtype
        self._graphs = [LoadedGraph(graph, run, highest, dtype) for graph, run in self._load(folder).items()]
        # uniform graphs first, as they take less work to feed and to run
        self._graphs.sort(key=lambda graph: (graph.draft_len, not graph.uniform))
        self._last_layout: tuple[tuple[Tensor, ...], list[int], tuple[int, ...], bool] = (), [], (), False
        self._unused: dict[str, Tensor] = {}

    @classmethod
    def check(cls, compiled: CompiledStep) -> None:
        """DependencyError or CheckpointError where its graphs cannot run here; they are not loaded."""
        compiled.check_kernels()

    @classmethod
    def allocate_kv(
        cls, compiled: CompiledStep, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> Sequence[KVLayer]:
        """The step's KV layers, zeroed, where the graphs want them: on the host, unless overridden."""
        return allocate_layers(compiled.kv, num_blocks, block_size, dtype)

    @abstractmethod
    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        """What runs each of `compiled.graphs`: takes the tensors graph.inputs, gives compiled.outputs, and changes the
        memory of `_flat_kv` (k, v of every layer)."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One launch; see protocols.Executable."""
        graph, tensors = self._checked(inputs)
        outputs = graph.run(tensors)
        return self._outputs(dict(zip(self.compiled.outputs, outputs, strict=True)), inputs.spec)

    def _graph_for(self, inputs: StepInputs) -> LoadedGraph:
        """The one for the step's K, which is no less than the number of drafts it is to make. Where drafts are not
        verified inside, any K is taken, or, of drafts to make, the fewest that are enough."""
        spec, uniform = inputs.spec, self._check_layout(inputs)
        K, wanted = spec.runtime_draft_len, spec.next_draft_len
        any_given, makes_drafts = not self.compiled.verifies_drafts, self.compiled.makes_drafts
        for graph in self._graphs:
            fits = graph.draft_len == K or (any_given and not graph.uniform)
            if fits and (graph.draft_len >= wanted or not makes_drafts) and (uniform or not graph.uniform):
                return graph
        lengths = ", ".join(map(str, self.compiled.draft_lens))
        raise EngineError(
            f"the engine has graphs for K = {lengths}; a step has {K} columns of draft_tokens and wants {wanted} drafts"
        )

    def _checked(self, inputs: StepInputs) -> tuple[LoadedGraph, list[Tensor]]:
        """What to run, on what."""
        graph = self._graph_for(inputs)
        tensors = list(graph.read(inputs))
        rows = inputs.spec.gather_ids.shape[0]
        for i, row in graph.optional:
            if tensors[i].numel() == 0:
                tensors[i] = self._filled(row, rows)
        dtypes = [tensor.dtype for tensor in tensors]
        if dtypes != graph.dtypes or not all(map(Tensor.is_contiguous, tensors)):
            for name, tensor, dtype in zip(graph.names, tensors, graph.dtypes, strict=True):
                if tensor.dtype != dtype or not tensor.is_contiguous():
                    raise EngineError(
                        f"{name} is {tensor.dtype} with strides {tensor.stride()}; a graph takes contiguous {dtype}"
                    )
        shapes = [tensor.shape for tensor in tensors]
        if shapes != graph.last_shapes:
            self._check_shapes(inputs, graph, shapes)
        for i, lowest, highest in graph.ranges:
            self._check_range(graph.names[i], tensors[i], lowest, highest)
        return graph, tensors

    def _check_shapes(self, inputs: StepInputs, graph: LoadedGraph, shapes: list[torch.Size]) -> None:
        spec = inputs.spec
        B, G, R, T = spec.batch_size, spec.num_generations, spec.gather_ids.shape[0], inputs.input_ids.shape[0]
        if self.compiled.makes_drafts and not B - G + G * (graph.draft_len + 1) == R >= B:
            raise EngineError(f"{B} requests, {G} of them generations with K = {graph.draft_len}, have {R} gather_ids")
        sizes = {"B": B, "G": G, "R": R, "T": T, "K": graph.draft_len, "width": self.compiled.hidden_width, "0": 0}
        sizes[STARTS] = B + 1
        for name, shape in zip(graph.names, shapes, strict=True):
            dims = INPUTS[name].dims
            if len(shape) != len(dims) or any(
                size != sizes.get(dim, size) for size, dim in zip(shape, dims, strict=True)
            ):
                wanted = ", ".join(str(sizes.get(dim, dim)) for dim in dims)
                raise EngineError(f"{name} has shape {list(shape)}, the graph takes [{wanted}]")
        graph.last_shapes = shapes

    def _check_range(self, name: str, tensor: Tensor, lowest: int, highest: int) -> None:
        low, high = map(int, torch.aminmax(tensor))
        if low < lowest or high > highest:
            raise EngineError(f"{name} holds {low}..{high}; allowed are {lowest}..{highest}")

    def _check_layout(self, inputs: StepInputs) -> bool:
        """seq_lens, gather_ids and draft_lens; and whether all requests are generations that bring the step's K drafts.
        The very tensors of the last launch, unwritten since, are not read again."""
        spec = inputs.spec
        tensors = spec.seq_lens, spec.gather_ids, spec.draft_lens
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        sizes = rows, _, K = inputs.input_ids.shape[0], *spec.draft_tokens.shape
        last, last_versions, last_sizes, uniform = self._last_layout
        written = -1 in versions or versions != last_versions
        if not written and sizes == last_sizes and all(map(operator.is_, tensors, last)):
            return uniform
        counts, gathered, drafts = (tensor.tolist() for tensor in tensors)
        if min(counts) < 1 or sum(counts) != rows:
            raise EngineError(f"seq_lens is {counts}, not 1 or more each and {rows}, the input_ids, in all")
        if min(gathered) < 0 or max(gathered) >= rows:
            raise EngineError(f"gather_ids holds {min(gathered)}..{max(gathered)}; allowed are 0..{rows - 1}")
        C = spec.num_contexts
        most = [0] * C + [min(count - 1, K) for count in counts[C:]]
        if len(drafts) != len(counts) or not all(0 <= n <= top for n, top in zip(drafts, most, strict=True)):
            raise EngineError(f"draft_lens is {drafts}; allowed are 0..{most}")
        generations = C == 0 or (K == 0 and not self.compiled.makes_drafts)  # a row each: whose is all the same
        uniform = generations and set(drafts) == {K} and set(counts) == {K + 1} and gathered == list(range(rows))
        self._last_layout = tensors, versions, sizes, uniform
        return uniform

    def _filled(self, row: GraphInput, rows: int) -> Tensor:
        held = self._unused.get(row.name)
        if held is None or held.shape[0] != rows:
            held = self._unused[row.name] = row.unused(rows)
        return held

    def _outputs(self, named: dict[str, Tensor], spec: SpecMetadata) -> StepOutputs:
        return step_outputs(named, spec.next_draft_len)
