"""Compiled steps of any backend: the content of an engine folder, and the checks before a graph is launched.

A folder has a ragged graph for each requested K, which verifies K drafts per request and makes K for the next step.
A backend may add a uniform graph for each K, for batches in which all requests bring K drafts. A `CompiledStep`
describes the folder. A backend is a subclass of `CompiledExecutable` that loads graphs.
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

from trtspec.backends.graph_io import INPUTS, STARTS, graph_reader, output_names, step_outputs
from trtspec.config.tree import Tree, tree_of
from trtspec.core import KVLayer, KVSpec, SpecMetadata, StepInputs, StepOutputs
from trtspec.errors import CheckpointError, DependencyError, EngineError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.step import Step
from trtspec.ops import kernel_interface

WEIGHTS = "weights.safetensors"
"""File of an engine folder that holds the constants of its graphs, each once."""
CONSTANTS = "constants.safetensors"
"""Second file next to WEIGHTS, where that holds only the decoder's weights and is the same for every speculation."""


@dataclass(frozen=True)
class Block:
    """A run of consecutive layers. Blocks with the same file share a graph, run on each block's own weights and KV."""

    file: str
    first: int  # index of its first layer in the decoder
    count: int

    def whole_name(self, constant: str) -> str:
        """Name, among the step's constants, of a constant of the block's graph, whose layers count from 0."""
        part, number, *rest = constant.split(".")
        return ".".join(("step.decoder", part, str(self.first + int(number)) if part == "layers" else number, *rest))


@dataclass(frozen=True)
class Lookup:
    """The lookup that turns token ids into the first layer's x [T, H], as names of constants.

    `weight` is packed if in_features is not 0.
    """

    weight: str
    scales: str = ""
    zeros: str = ""
    in_features: int = 0
    read_as: str = ""  # [V] int64: token id -> id to look up; "": token ids are looked up as they are


@dataclass(frozen=True)
class Graph:
    """A graph in one file, which verifies up to `draft_len` drafts a request and makes `draft_len` for the next step.

    A uniform graph takes only batches of generations that bring `draft_len` drafts each. Where the decoder is cut,
    `file` is the part after its layers.
    """

    file: str
    draft_len: int
    uniform: bool
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class CompiledStep:
    """A description of what a backend compiled into a folder; plain data, written into the engine's config.json."""

    graphs: tuple[Graph, ...]  # in the order of draft_len; each draft_len has a ragged graph
    outputs: tuple[str, ...]
    kv: tuple[KVSpec, ...]
    dtype: str  # of the KV cache
    vocab_size: int
    weight_bytes: int  # weights that one launch reads
    kernels: str  # ops.kernel_interface that graphs were compiled for; "": graphs call torch's dispatcher
    made_for: Mapping[str, str] = field(default_factory=dict)  # what the backend's code requires of the machine
    kv_blocks: int | None = None  # blocks of the cache that graphs take; None: any number
    hidden_width: int = 0  # elements in a row of hidden_states, which have `dtype`; 0: graphs take none
    linear: bool = False  # caches are [blocks - 1, kv heads, tokens, head size]: no scratch, one block per sequence
    verifies_drafts: bool = False  # inside the graphs; drafts to verify then have the K of their graph
    makes_drafts: bool = False  # inside the graphs, K drafts in each
    takes_constraints: bool = False  # graphs take constraints on the target's logits and return the logits
    lookup: Lookup | None = None  # token embedding, before the blocks
    blocks: tuple[Block, ...] = ()  # the decoder's layers in order, for all graphs; (): each graph has the layers
    read_layers: tuple[int, ...] = ()  # layers of the blocks whose residual streams graphs take
    tree: Tree | None = None  # drafts to verify are its nodes; None: a chain

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
        """Return the description of these graphs of `step`. constraints: same meaning as in graph_io.input_names."""
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
            tree=None if step.tree is None else step.tree.tree,
        )

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """K of the graphs, ascending."""
        return tuple(graph.draft_len for graph in self.graphs if not graph.uniform)

    def check_kernels(self) -> None:
        """Raise DependencyError if the kernels that graphs call are missing, CheckpointError if they are others."""
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
        """Return the fields as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledStep:
        """Return the CompiledStep that to_dict turned into `data`. CheckpointError if `data` does not describe one."""
        try:
            parts: dict[str, Any] = {
                "graphs": tuple(Graph(**{**graph, "inputs": tuple(graph["inputs"])}) for graph in data["graphs"]),
                "outputs": tuple(data["outputs"]),
                "kv": tuple(KVSpec(*layer) for layer in data["kv"]),
                "lookup": None if data["lookup"] is None else Lookup(**data["lookup"]),
                "blocks": tuple(Block(**block) for block in data["blocks"]),
                "read_layers": tuple(data["read_layers"]),
                "tree": None if data.get("tree") is None else tree_of(data["tree"]),  # older folders have none
            }
            names = [one.name for one in fields(cls)]
            return cls(**{name: parts[name] if name in parts else data[name] for name in names})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the engine's config.json does not describe its graphs ({error!r}); rebuild it"
            ) from error


KEPT = 64
"""Numbers of rows for which a graph keeps tensors that replace unused inputs."""


class LoadedGraph:
    """A graph in memory, with the properties that its inputs must have.

    highest: largest allowed values, by the names in GraphInput.values. dtype: dtype of the model.
    """

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
        self._optional = [(i, row) for i, row in enumerate(rows) if row.user]
        self._unused: dict[int, list[tuple[int, Tensor]]] = {}
        self.ranges = [(i, row.values[0], highest[row.values[1]]) for i, row in enumerate(rows) if row.values]
        self.last_shapes: list[torch.Size] = []  # shapes of the last inputs that passed the check

    def unused(self, rows: int) -> list[tuple[int, Tensor]]:
        """Number of each optional input, and the tensor that replaces it if none of so many logits rows uses it."""
        found = self._unused.get(rows)
        if found is None:
            if len(self._unused) == KEPT:
                self._unused.clear()
            found = self._unused[rows] = [(i, row.unused(rows)) for i, row in self._optional]
        return found


class CompiledExecutable(ABC):
    """The graphs of a compiled step and its KV layers, as a protocols.Executable. Subclasses load the graphs.

    Raises EngineError for inputs that a graph would misread; graphs do not check their inputs.
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
        # uniform graphs first: their inputs take less work to prepare, and they run faster
        self._graphs.sort(key=lambda graph: (graph.draft_len, not graph.uniform))
        self._last_layout: tuple[tuple[Tensor, ...], list[int], tuple[int, ...], bool] = (), [], (), False

    @classmethod
    def check(cls, compiled: CompiledStep) -> None:
        """Raise DependencyError or CheckpointError if the graphs cannot run on this machine. No graph is loaded."""
        compiled.check_kernels()

    @classmethod
    def allocate_kv(
        cls, compiled: CompiledStep, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> Sequence[KVLayer]:
        """Allocate the step's KV layers, zeroed, where the graphs need them: on the host, unless overridden."""
        return allocate_layers(compiled.kv, num_blocks, block_size, dtype)

    @abstractmethod
    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        """Return a function for each of `compiled.graphs` that runs it.

        The function takes the tensors graph.inputs, returns compiled.outputs, and changes the memory of `_flat_kv`
        (k and v of every layer).
        """

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Check the inputs and launch one graph; protocols.Executable has the contract."""
        graph, tensors = self._checked(inputs)
        outputs = graph.run(tensors)
        return self._outputs(dict(zip(self.compiled.outputs, outputs, strict=True)), inputs.spec)

    def _graph_for(self, inputs: StepInputs) -> LoadedGraph:
        """Return the graph for the step's K, which is at least the number of drafts that the step is to make.

        Graphs that do not verify drafts accept any K. If they make drafts, it is the graph with the smallest K that is
        enough.
        """
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
        """Return the graph to run and its checked input tensors."""
        graph = self._graph_for(inputs)
        tensors = list(graph.read(inputs))
        for i, unused in graph.unused(inputs.spec.gather_ids.shape[0]):
            if not tensors[i].numel():
                tensors[i] = unused
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
        """Check seq_lens, gather_ids and draft_lens; return whether a uniform graph can run the batch.

        It can if all requests are generations that bring the step's K drafts. If the tensors are the same objects as
        in the last launch, and no code wrote to them since, they are not read again.
        """
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
        if len(gathered) != len(drafts) + sum(drafts):
            raise EngineError(f"{len(drafts)} requests with {sum(drafts)} drafts have {len(gathered)} gather_ids")
        plain = not (self.compiled.makes_drafts or self.compiled.verifies_drafts)
        generations = C == 0 or (K == 0 and plain)  # a row each, of either kind
        uniform = generations and set(drafts) == {K} and set(counts) == {K + 1} and gathered == list(range(rows))
        self._last_layout = tensors, versions, sizes, uniform
        return uniform

    def _outputs(self, named: dict[str, Tensor], spec: SpecMetadata) -> StepOutputs:
        return step_outputs(named, spec.next_draft_len)
