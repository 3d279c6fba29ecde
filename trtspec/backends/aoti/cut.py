"""Cut a step at its residual stream, so that equal layers are compiled once, whatever their number.

Runs of layers are blocks. Equal blocks share one graph, which runs with the weights and KV of each block. The embedding
lookup before the blocks is not a graph. The part after the last layer is an epilogue, one graph for each K. All
arithmetic is in the order of one whole graph, so results have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from trtspec.backends.compiled import Block, Lookup
from trtspec.backends.export import export, kv_shapes, open_shapes, open_sizes
from trtspec.backends.graph_io import STARTS, graph_inputs, graph_outputs, layer_inputs, output_names, step_inputs
from trtspec.core import AttnMetadata, KVLayer, StepInputs
from trtspec.methods.step import DecodeStep, Step
from trtspec.models.attention import Attend
from trtspec.models.layers import PackedEmbedding

LEAST_LAYERS = 12
"""Smallest number of layers of a decoder that is cut.

A smaller decoder compiles nearly as fast uncut, and calls of blocks would slow down a small model's steps.
"""
_SIZES = range(2, 9)  # possible numbers of layers in a block; the last block may have fewer


def blocks_of(step: Step) -> tuple[Block, ...]:
    """Return the blocks into which a step's decoder is cut.

    () if it is not cut: it has too few layers, or draft layers read the target's KV.
    """
    if not isinstance(step, DecodeStep) or len(step.decoder.layers) < LEAST_LAYERS or step.reads_target_kv:
        return ()
    kinds = [_kind(step, layer) for layer in range(len(step.decoder.layers))]
    size = min(_SIZES, key=lambda size: _cost(kinds, size))
    files: dict[Any, str] = {}
    made = []
    for first in range(0, len(kinds), size):
        run = tuple(kinds[first : first + size])
        made.append(Block(files.setdefault(run, f"layers{len(files)}.pt2"), first, len(run)))
    return tuple(made)


def lookup_of(step: DecodeStep) -> Lookup:
    """Return the lookup that turns token ids into the first layer's x."""
    embedding, table = step.decoder.embedding, step.id_table
    read_as = "" if table is None else next(name for name, tensor in tensors_of(step).items() if tensor is table)
    if isinstance(embedding, PackedEmbedding):
        weight, scales, zeros = (f"step.decoder.head.{part}" for part in ("weight", "scales", "zeros"))
        return Lookup(weight, scales, zeros, embedding.head.in_features, read_as)
    return Lookup("step.decoder.embedding.weight", read_as=read_as)


def tensors_of(step: DecodeStep) -> dict[str, Tensor]:
    """Return all tensors that may be constants of a step's graphs, by their names in the graphs."""
    own = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
    return {f"step.{name}": tensor for name, tensor in own if tensor.numel()}


def gives_all_streams(step: DecodeStep, blocks: Sequence[Block]) -> bool:
    """Whether blocks return the residual stream after each layer, because one inside a block is read."""
    return not {block.first + block.count - 1 for block in blocks}.issuperset(read_layers(step))


def read_layers(step: DecodeStep) -> tuple[int, ...]:
    """Layers whose residual streams an epilogue takes, ascending."""
    return tuple(sorted({layer for layer in step.read_layers if layer >= 0} | {len(step.decoder.layers) - 1}))


def epilogue_kv(step: DecodeStep) -> int:
    """Return the first KV layer that the epilogue takes.

    It takes those of draft layers. If drafts are a tree it takes all, as it puts the accepted path in line.
    """
    return len(step.decoder.layers) if step.tree is None else 0


def _cost(kinds: Sequence[Any], size: int) -> float:
    """Cost of blocks of `size` layers, in units of one compiled layer.

    Each graph costs 1.5 in addition to its layers. Each call of a block in a step costs 0.4.
    """
    runs = [tuple(kinds[first : first + size]) for first in range(0, len(kinds), size)]
    return sum(len(run) + 1.5 for run in set(runs)) + 0.4 * len(runs)


def _kind(step: DecodeStep, layer: int) -> Any:
    """Properties on which a layer's graph depends. They are equal for layers that differ only in weight values."""
    parts = []
    for name, module in step.decoder.layers[layer].named_modules():
        facts = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "layer"}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors]
        parts.append((name, type(module).__qualname__, repr(sorted(facts.items())), repr(shapes)))
    return step.kv_layers[layer], step.kv_groups[layer], tuple(parts)


def export_block(
    step: DecodeStep, example: StepInputs, names: Sequence[str], kv: Sequence[KVLayer], block: Block, all_streams: bool
) -> ExportedProgram:
    """Export a block: x [T, H], tensors of layer_inputs, KV -> the residual stream after its last layer.

    all_streams: return the stream after each layer. names: input names of a ragged graph, for which `example` is made.
    The nodes of its trees are in place (TreeTables.ancestors).
    """
    dims, own = open_sizes(), list(kv[block.first : block.first + block.count])
    rows = graph_inputs(example, layer_inputs(names, step.tree is not None))
    shapes = ({0: dims["T"]}, open_shapes(rows, {**dims, STARTS: dims["B"] + 1}), kv_shapes(len(own)))
    return export(_Layers(step, block, all_streams), (_stream(step, example), rows, own), shapes)


def export_epilogue(
    step: DecodeStep, example: StepInputs, names: Sequence[str], kv: Sequence[KVLayer]
) -> ExportedProgram:
    """Export the epilogue: tensors of `names`, streams after read_layers, KV -> the step's outputs.

    The KV is that of `epilogue_kv`.
    """
    tensors, dims = graph_inputs(example, names), open_sizes()
    streams = [_stream(step, example) for _ in read_layers(step)]
    own = list(kv[epilogue_kv(step) :])
    shapes = (open_shapes(tensors, dims), [{0: dims["T"]}] * len(streams), kv_shapes(len(own)))
    return export(_Epilogue(step, example.spec.next_draft_len), (tensors, streams, own), shapes)


def _stream(step: DecodeStep, example: StepInputs) -> Tensor:
    return step.like.new_zeros(example.input_ids.shape[0], step.decoder.spec.hidden_size)


class _Given(nn.Module):
    """A replacement for a layer, which returns the residual stream given to it.

    It returns its input if `stream` is None, as for layers whose stream only the next layer reads.
    """

    stream: Tensor | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        stream = x if self.stream is None else self.stream
        return stream if rows is None else stream[rows]


class _Layers(nn.Module):
    def __init__(self, step: DecodeStep, block: Block, all_streams: bool) -> None:
        super().__init__()
        self.layers = step.decoder.layers[block.first : block.first + block.count]
        self.rotary = step.decoder.rotary
        self.before: list[Any] = [None] * block.first  # KV of the layers before the block
        self.attend = step.attend
        self.all_streams = all_streams

    def forward(self, x: Tensor, rows: dict[str, Any], kv: list[KVLayer]) -> list[Tensor]:
        attn = AttnMetadata(**rows)
        attend = self.attend(attn, [*self.before, *kv])
        cos, sin = self.rotary(attn.positions(x.shape[0]), x.dtype)
        streams = []
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
            streams.append(x)
        return streams if self.all_streams else [x]


class _Epilogue(nn.Module):
    def __init__(self, step: DecodeStep, next_draft_len: int) -> None:
        super().__init__()
        self.given = [_Given() for _ in step.decoder.layers]
        self.read = [self.given[layer] for layer in read_layers(step)]
        self.step = _with_layers(step, self.given)
        self.before: list[Any] = [None] * epilogue_kv(step)  # KV of the layers whose KV it does not take
        self.next_draft_len = next_draft_len

    def forward(self, tensors: dict[str, Tensor], streams: list[Tensor], kv: list[KVLayer]) -> dict[str, Tensor]:
        for layer, stream in zip(self.read, streams, strict=True):
            layer.stream = stream
        inputs = step_inputs(tensors, self.next_draft_len)
        outputs = self.step(inputs, [*self.before, *kv])
        for layer in self.read:
            layer.stream = None
        return graph_outputs(outputs, output_names(self.step, inputs.spec.constraints is not None))


def _with_layers(step: DecodeStep, layers: Sequence[nn.Module]) -> DecodeStep:
    """Return a copy of the step with other layers, on the same weights."""
    made: DecodeStep = _shallow(step)
    decoder = _shallow(step.decoder)
    decoder.layers = nn.ModuleList(layers)
    made.decoder = decoder
    return made


def _shallow(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
