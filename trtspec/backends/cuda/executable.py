"""Steps on a GPU through torch: the host queues them without waiting, and generation steps run as CUDA graphs.

A CUDA graph runs the same kernels on the same memory again, at next to no cost to the host. So steps of generations
alone are captured for a few batch sizes (buckets). A smaller batch is padded with rows that write to scratch. Block
tables have a few widths too, as attention launches blocks for as many tokens as a table holds. static_graph.py has the
memory of inputs and outputs. Steps with a context row run kernel by kernel. So do all steps that return or take hidden
states, because the number of their rows depends on what was accepted.

Tokens that a step draws stay on the device, where the next step can read them (carry.Carry). Hidden states are taken
and returned on the device, without a copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from trtspec.backends.compiled import CompiledExecutable, CompiledStep, Graph, LoadedGraph
from trtspec.backends.cuda.device import Mark, WorkQueue
from trtspec.backends.cuda.static_graph import (
    BAN_COLUMNS,
    CARRY,
    EVERY_KIND,
    CapturedGraphs,
    GraphMemory,
    Kind,
    Parts,
    Region,
    StaticGraph,
    kind_of,
    leaves_out,
    left_out,
)
from trtspec.backends.export import GraphStep
from trtspec.backends.graph_io import OUTPUTS, input_names, step_inputs
from trtspec.carry import Carry
from trtspec.core import KVLayer, SamplingTensors, SpecMetadata, StepInputs, StepOutputs
from trtspec.methods.step import Step

LEAST_COLUMNS = 64
"""Smallest width of the block tables of CUDA graphs, unless no sequence needs as many columns."""


@dataclass(frozen=True)
class LaunchLimits:
    """Limits that hold for every launch."""

    max_batch_size: int
    max_columns: int  # width of block tables

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes of graphs: 1, 2, 4, multiples of 8 up to 64, then multiples of 32, and the largest."""
        sizes = {1, 2, 4, *range(8, 65, 8), *range(96, self.max_batch_size, 32), self.max_batch_size}
        return tuple(sorted(size for size in sizes if size <= self.max_batch_size))

    def bucket(self, batch: int) -> int:
        """Smallest bucket that holds `batch` requests."""
        return next(size for size in self.buckets if size >= batch)

    @property
    def least_columns(self) -> int:
        """Smallest width of a graph's block tables."""
        return min(LEAST_COLUMNS, self.max_columns)

    def columns(self, tables: Tensor) -> int:
        """Width of the block tables of a graph for `tables` [B, M], whose last columns may be unused.

        It is LEAST_COLUMNS times a power of two, or max_columns.
        """
        used = tables.any(0).nonzero()
        needed, width = int(used[-1]) + 1 if len(used) else 1, self.least_columns
        while width < needed:
            width *= 2
        return min(width, self.max_columns)


_ON_DEVICE = "hidden_states"
"""Input and output that stay on the device."""
_LOGITS = "logits"
"""Output that is copied to the host only for batches with constraints."""


class DeviceLaunch:
    """A launched step on the device, as a protocols.Launch."""

    def __init__(self, mark: Mark, read: Callable[[], StepOutputs]) -> None:
        self._mark, self._read = mark, read

    def wait(self) -> StepOutputs:
        """Wait for the step and return its outputs. DeviceError if the device failed."""
        self._mark.wait()
        return self._read()


class CudaExecutable(CompiledExecutable):
    """A protocols.AsyncExecutable that runs graphs on a GPU.

    takes_all: graphs take every sampling input, even if no row uses it.
    """

    takes_all = True

    def __init__(
        self, compiled: CompiledStep, folder: Path, kv: Sequence[KVLayer], work: WorkQueue, limits: LaunchLimits
    ) -> None:
        self._work, self._limits = work, limits
        super().__init__(compiled, folder, kv)
        self._width = max(compiled.draft_lens) + 1  # number of tokens kept for each request
        self._captured = CapturedGraphs()
        taken = {name for graph in self._graphs if graph.uniform for name in graph.names}
        most = self._width - 1, limits.buckets[-1]
        largest = self._input_region(*most, limits.max_columns, EVERY_KIND | {"masks"}, taken)
        given = self._output_region(*most)
        self._memory = GraphMemory(work, largest.nbytes, given.nbytes, limits.buckets[-1] * self._width)
        device = work.device
        # next_new_tokens, next_draft_parents and next_kv_lens of the last launch
        shape = limits.max_batch_size, self._width - 1
        self._new_parents = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._new_tokens = torch.zeros(limits.max_batch_size, self._width, dtype=torch.int64, device=device)
        self._kept_lens = torch.zeros(limits.max_batch_size, dtype=torch.int32, device=device)

    @abstractmethod
    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        """Return functions as in the base class, but for tensors on the device."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Launch a step and wait for its outputs."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> DeviceLaunch:
        """Queue a step, as protocols.AsyncExecutable says. EngineError for inputs that a graph would misread."""
        graph, tensors = self._checked(inputs)
        spec = inputs.spec
        kind = self._kind_of_batch(spec) if graph.uniform else None
        if kind is not None:
            columns = self._limits.columns(tensors[graph.names.index("block_tables")])
            key = graph, self._limits.bucket(spec.batch_size), columns, kind
            captured = self._captured.at_first_use(key, lambda: self._capture(*key))
            if captured is not None:
                return self._replay(captured, graph, tensors, carry, spec)
        read = graph.read(inputs)
        kind = self.kind(spec.sampling) | {"constraints", "masks"}
        tensors = [
            given if leaves_out(kind, name) else tensor
            for name, given, tensor in zip(graph.names, read, tensors, strict=True)
        ]
        return self._run_kernels(graph, tensors, carry, spec)

    def capture(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture the graphs that most steps need: greedy graphs, and graphs with every filter, for short sequences.

        The other graphs are captured on first use. report: is called with the number done and the total.
        """
        lengths = (0, self._width - 1)
        uniform = [
            graph
            for graph in self._graphs
            if graph.uniform and (self.compiled.makes_drafts or graph.draft_len in lengths)
        ]
        sizes, columns = self._limits.buckets[::-1], self._limits.least_columns
        todo = [(graph, size, columns, kind) for graph in uniform for size in sizes for kind in self.most_kinds]
        for done, one in enumerate(todo):
            report(done, len(todo))
            self._captured[one] = self._capture(*one)

    # -- a step as a CUDA graph ---------------------------------------------------------------------------------------

    def kind(self, sampling: SamplingTensors) -> Kind:
        """Kind of a graph for such rows."""
        return EVERY_KIND if self.takes_all else kind_of(sampling)

    def _kind_of_batch(self, spec: SpecMetadata) -> Kind | None:
        """Kind of a graph that takes a batch of generations; None if no graph does."""
        constraints = spec.constraints
        if spec.sampling.ban_ids.shape[1] > BAN_COLUMNS:
            return None
        if constraints is None:
            return self.kind(spec.sampling)
        if constraints.history.numel() or constraints.penalties.numel() or constraints.bias_ids.numel():
            return None  # their sizes grow with the sequences
        masks: Kind = frozenset(("logits", "masks") if constraints.allow_mask.numel() else ("logits",))
        return self.kind(spec.sampling) | masks

    @property
    def most_kinds(self) -> tuple[Kind, ...]:
        """Kinds of the graphs that most steps need."""
        if self.takes_all:
            return (EVERY_KIND,)
        return frozenset(), EVERY_KIND - {"bans"}

    def _input_region(self, draft_len: int, batch: int, columns: int, kind: Kind, names: Iterable[str]) -> Region:
        """Return the layout of the inputs of a uniform graph."""
        sizes = {**dict.fromkeys("TR", batch * (draft_len + 1)), "B": batch, "G": batch, "K": draft_len, "0": 0}
        sizes |= {"columns": columns, "bans": BAN_COLUMNS, "words": -(-self.compiled.vocab_size // 32)}
        return Region.of_inputs(kind, (*names, *CARRY), sizes)

    def _output_region(self, draft_len: int, batch: int) -> Region:
        sizes = {"R": batch * (draft_len + 1), "B": batch, "K": draft_len, "K + 1": draft_len + 1}
        parts: Parts = {}
        for name in self.compiled.outputs:
            if name not in (_ON_DEVICE, _LOGITS):  # CUDA graphs do not return states; logits are too large
                row = OUTPUTS[name]
                parts[name] = tuple(sizes[dim] for dim in row.dims), cast("torch.dtype", row.dtype)
        return Region(parts)

    def _capture(self, graph: LoadedGraph, batch: int, columns: int, kind: Kind) -> StaticGraph:
        inputs = self._input_region(graph.draft_len, batch, columns, kind, graph.names)
        rows, device = batch * (graph.draft_len + 1), self._work.device
        unused = left_out(kind, graph.names, rows, device)
        kept: list[Tensor] = []

        def keep() -> None:
            # outputs of the last step, for the next
            kept.extend(one.clone() for one in (self._new_tokens, self._kept_lens, self._new_parents))

        def step(there: dict[str, Tensor]) -> Mapping[str, Tensor]:
            named = {**there, **unused}
            carry = Carry(there["carry_tokens"], there["carry_kept"])
            given = self._step(graph, [named[name] for name in graph.names], carry)
            named = dict(zip(self.compiled.outputs, given, strict=True))
            return {name: tensor for name, tensor in named.items() if name != _LOGITS or "logits" in kind}

        def put_back() -> None:
            self._new_tokens.copy_(kept[0])
            self._kept_lens.copy_(kept[1])
            self._new_parents.copy_(kept[2])

        self._work.submit(keep)
        outputs = self._output_region(graph.draft_len, batch)
        try:
            return self._memory.capture(inputs, outputs, graph.draft_len + 1, step)
        finally:  # the next step reads them, if this capture fails, too
            self._work.submit(put_back)

    def _replay(
        self, captured: StaticGraph, graph: LoadedGraph, tensors: list[Tensor], carry: Carry | None, spec: SpecMetadata
    ) -> DeviceLaunch:
        named = dict(zip(graph.names, tensors, strict=True))
        if carry is not None:
            named |= {"carry_tokens": carry.tokens, "carry_kept": carry.kept}
        copies: dict[str, Tensor] | None = {} if captured.large else None
        views = self._memory.replay(captured, named, copies)

        def read() -> StepOutputs:
            rows = {"B": spec.batch_size, "R": spec.batch_size * (graph.draft_len + 1)}
            given = {name: view[: rows[OUTPUTS[name].dims[0]]].clone() for name, view in views.items()}
            given |= {name: copy[: rows[OUTPUTS[name].dims[0]]] for name, copy in (copies or {}).items()}
            return self._outputs(given, spec)

        return DeviceLaunch(self._work.mark(), read)

    # -- a step kernel by kernel --------------------------------------------------------------------------------------

    def _run_kernels(
        self, graph: LoadedGraph, tensors: list[Tensor], carry: Carry | None, spec: SpecMetadata
    ) -> DeviceLaunch:
        host_outputs: dict[str, Tensor] = {}

        def work() -> None:
            unused: dict[str, Tensor] = {}
            if spec.constraints is None:
                unused = left_out(EVERY_KIND, graph.names, spec.gather_ids.shape[0], self._work.device)
            there = [
                tensor if name == _ON_DEVICE or name in unused else self._work.to_device(tensor)
                for name, tensor in (dict(zip(graph.names, tensors, strict=True)) | unused).items()
            ]
            carried = carry and Carry(self._work.to_device(carry.tokens), self._work.to_device(carry.kept))
            for name, tensor in zip(self.compiled.outputs, self._step(graph, there, carried), strict=True):
                if name != _LOGITS or spec.constraints is not None:
                    host_outputs[name] = tensor if name == _ON_DEVICE else self._work.to_host(tensor)

        def read() -> StepOutputs:
            return self._outputs(host_outputs, spec)

        self._work.submit(work)
        return DeviceLaunch(self._work.mark(), read)

    # -- on the device ------------------------------------------------------------------------------------------------

    def run_pass(self, inputs: StepInputs) -> Tensor:
        """Return the tokens [R] int64 of a step without drafts, inside a work item; all tensors are on the device."""
        graph = next(graph for graph in self._graphs if graph.uniform == (inputs.attn.width == 1))
        named = dict(zip(self.compiled.outputs, graph.run(list(graph.read(inputs))), strict=True))
        return named["tokens"]

    @torch.no_grad()
    def _step(self, graph: LoadedGraph, tensors: list[Tensor], carry: Carry | None) -> list[Tensor]:
        """Run a graph on tensors on the device and keep what the next step needs; outputs are on the device, too."""
        if carry is not None:
            tensors = self._carried(graph, tensors, carry)
        outputs = graph.run(tensors)
        self._keep(outputs, tensors[graph.names.index("kv_lens")])
        return outputs

    def _carried(self, graph: LoadedGraph, tensors: list[Tensor], carry: Carry) -> list[Tensor]:
        named, vocab_size = dict(zip(graph.names, tensors, strict=True)), self.compiled.vocab_size
        if graph.uniform:  # a uniform graph computes the rest from these inputs
            named["input_ids"] = carry.read_ids(named["input_ids"], self._new_tokens, vocab_size)
            named["kv_lens"] = carry.read_lens(named["kv_lens"], self._kept_lens, graph.draft_len + 1)
            if graph.draft_len and self.compiled.verifies_drafts:
                drafts = named["input_ids"].view(-1, graph.draft_len + 1)[:, 1:]
                named["forced_accept"] = carry.read_forced(named["forced_accept"], drafts)
            if "draft_parents" in named:
                named["draft_parents"] = carry.read_parents(named["draft_parents"], self._new_parents)
            return [named[name] for name in graph.names]
        buffers = self._new_tokens, self._kept_lens, vocab_size, self._new_parents
        inputs = carry.apply(step_inputs(named), *buffers)
        return list(graph.read(inputs))

    def _keep(self, outputs: list[Tensor], kv_lens: Tensor) -> None:
        """Keep the next step's input tokens, and the number of tokens kept before them.

        Nothing is kept of a batch with drafts from the host, which has more rows than requests.
        """
        named = dict(zip(self.compiled.outputs, outputs, strict=True))
        if "next_new_tokens" in named:
            tokens, kept = named["next_new_tokens"], named["next_kv_lens"]
        elif self._width == 1 and not self.compiled.makes_drafts and named["tokens"].shape == kv_lens.shape:
            tokens, kept = named["tokens"][:, None], kv_lens
        else:
            return  # drafts come from the host
        B, width = tokens.shape
        self._new_tokens[:B, :width].copy_(tokens)
        self._kept_lens[:B].copy_(kept)
        if "next_draft_parents" in named:
            self._new_parents[:B, : width - 1].copy_(named["next_draft_parents"])


class ModuleOnCuda(CudaExecutable):
    """A CudaExecutable for a step module on the device, without an engine folder."""

    takes_all = False

    def __init__(
        self, step: Step, compiled: CompiledStep, kv: Sequence[KVLayer], work: WorkQueue, limits: LaunchLimits
    ) -> None:
        self.step = step
        super().__init__(compiled, Path(), kv, work, limits)

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        return {graph: self._runner(graph) for graph in self.compiled.graphs}

    def run_pass(self, inputs: StepInputs) -> Tensor:
        """Return the tokens as CudaExecutable.run_pass does, from the step module itself instead of a graph."""
        return self.step(inputs, self.kv).tokens  # type: ignore[no-any-return]

    def _runner(self, graph: Graph) -> Callable[[list[Tensor]], list[Tensor]]:
        made = graph.draft_len if self.compiled.makes_drafts else 0
        module = GraphStep(self.step, made, graph.draft_len + 1 if graph.uniform else 0)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            outputs, _ = module(dict(zip(graph.inputs, tensors, strict=True)), self.kv)
            return [outputs[name] for name in self.compiled.outputs]

        return run


def module_graphs(
    step: Step, draft_lens: Sequence[int], uniform: bool = True, constraints: bool = False
) -> CompiledStep:
    """Describe the graphs of `ModuleOnCuda`: one per K for any batch and, if `uniform`, one per K for generations only.

    draft_lens: every K that a step may verify, or may make for the next step. constraints: same meaning as in
    graph_io.input_names.
    """
    wanted = [one for one in launch_graphs(step, draft_lens) if uniform or not one[1]]
    graphs = [
        Graph("", K, is_uniform, input_names(step, is_uniform, constraints=constraints)) for K, is_uniform in wanted
    ]
    return CompiledStep.of(step, graphs, constraints)


def launch_graphs(step: Step, draft_lens: Sequence[int]) -> list[tuple[int, bool]]:
    """Return (K, whether it is uniform) of each graph that launches with these K need."""
    every_k = step.makes_drafts or step.verifies_drafts
    ragged = draft_lens if every_k else (max(draft_lens),)  # else one graph takes every K
    uniform = draft_lens if has_uniform_graphs(step) else ()
    return [*((K, False) for K in ragged), *((K, True) for K in uniform)]


def has_uniform_graphs(step: Step) -> bool:
    """Whether steps can be captured: the numbers of their rows and hidden states follow from the batch size."""
    draft_alone = step.makes_drafts and not step.verifies_drafts  # draft layers that read what was accepted
    return not (step.hidden_width or step.gives_hidden_states or draft_alone)
