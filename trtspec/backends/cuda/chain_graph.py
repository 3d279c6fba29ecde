"""All passes of a draft model's chain as one CUDA graph, so that no data passes through the host between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trtspec.backends.cuda.device import WorkQueue
from trtspec.backends.cuda.executable import CudaExecutable, LaunchLimits
from trtspec.backends.cuda.static_graph import (
    BAN_COLUMNS,
    EVERY_KIND,
    CapturedGraphs,
    GraphMemory,
    Kind,
    Region,
    StaticGraph,
    left_out,
)
from trtspec.backends.graph_io import INPUTS, graph_inputs
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.chain import Pass, run_chain
from trtspec.methods.drafter import CHAIN_ROWS

_SAMPLING = tuple(row.name for row in INPUTS.values() if row.part == "spec.sampling")
_INPUTS = ("input_ids", "kv_lens", "block_tables", *_SAMPLING)


class ChainOnCuda:
    """A methods.drafter.ChainExecutable with one CUDA graph for each batch size, K and kind of sampling.

    longest: the largest K.
    """

    def __init__(self, draft: CudaExecutable, work: WorkQueue, limits: LaunchLimits, longest: int) -> None:
        self._draft, self._work, self._limits, self._longest = draft, work, limits, longest
        self._captured = CapturedGraphs()
        batch = limits.max_batch_size
        inputs, outputs = self._inputs(batch, limits.max_columns, EVERY_KIND), self._outputs(batch, longest)
        self._memory = GraphMemory(work, inputs.nbytes, outputs.nbytes)

    def capture(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture the graphs that most steps need: those of the longest chains, for short sequences.

        The other graphs are captured on first use. report: is called with the number done and the total.
        """
        sizes, columns = self._limits.buckets[::-1], self._limits.least_columns
        todo = [(size, columns, self._longest, kind) for size in sizes for kind in self._draft.most_kinds]
        for done, one in enumerate(todo):
            report(done, len(todo))
            self._captured[one] = self._capture(*one)

    def run_chain(self, inputs: StepInputs, num_tokens: int) -> Tensor | None:
        """Run the chain and return its drafts [B, K]; None if no graph takes the batch.

        Requests may ban more ids than graphs have columns for, or memory does not suffice for one more graph.
        """
        batch, sampling = inputs.attn.batch_size, inputs.spec.sampling
        if sampling.ban_ids.shape[1] > BAN_COLUMNS:
            return None
        columns = self._limits.columns(inputs.attn.block_tables)
        key = self._limits.bucket(batch), columns, num_tokens, self._draft.kind(sampling)
        graph = self._captured.at_first_use(key, lambda: self._capture(*key))
        if graph is None:
            return None
        views = self._memory.replay(graph, graph_inputs(inputs, _INPUTS))
        self._work.mark().wait()
        return views["drafts"][:batch].clone()

    def _capture(self, batch: int, columns: int, num_tokens: int, kind: Kind) -> StaticGraph:
        unused = left_out(kind, _SAMPLING, batch, self._work.device)

        def step(there: dict[str, Tensor]) -> Mapping[str, Tensor]:
            drafts = chain_step({**there, **unused}, num_tokens, self._draft.run_pass, self._draft.compiled.vocab_size)
            return {"drafts": drafts}

        inputs, outputs = self._inputs(batch, columns, kind), self._outputs(batch, num_tokens)
        return self._memory.capture(inputs, outputs, CHAIN_ROWS, step)

    def _inputs(self, batch: int, columns: int, kind: Kind) -> Region:
        sizes = {"T": CHAIN_ROWS * batch, "R": batch, "B": batch}
        sizes |= {"columns": columns, "bans": BAN_COLUMNS}
        return Region.of_inputs(kind, _INPUTS, sizes)

    def _outputs(self, batch: int, num_tokens: int) -> Region:
        return Region({"drafts": ((batch, num_tokens), torch.int64)})


@torch.no_grad()
def chain_step(tensors: Mapping[str, Tensor], num_tokens: int, run_pass: Pass, vocab_size: int) -> Tensor:
    """Return the drafts [B, K] int64, on the device.

    Where nothing could be drawn, the id is past the vocabulary, and the host refuses it. tensors: those of _INPUTS, on
    the device, with CHAIN_ROWS rows per request.
    """
    lens = tensors["kv_lens"]
    starts = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * CHAIN_ROWS
    attn = AttnMetadata(starts, lens, tensors["block_tables"], lens.new_empty(0), CHAIN_ROWS)
    sampling = SamplingTensors(**{name: tensors[name] for name in _SAMPLING})

    def run(inputs: StepInputs) -> Tensor:  # its input may be an id past the vocabulary: any other id will do
        return run_pass(replace(inputs, input_ids=inputs.input_ids.clamp(max=vocab_size - 1)))

    inputs = StepInputs(tensors["input_ids"], attn, SpecMetadata.plain((), attn, sampling))
    return run_chain(run, inputs, num_tokens)
