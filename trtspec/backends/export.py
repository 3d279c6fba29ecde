"""A step as a torch.export graph from tensors to tensors; every size except the model's own stays dynamic.

A ragged graph takes any batch: contexts, chunks of contexts and generations with up to K drafts may mix. A uniform
graph is the same module for generations that bring exactly K + 1 rows each. It takes fewer tensors, because the owner
of each row and the rows that draw are known. Both are exported with mutating ops (eager, AOTInductor) or, from a
functional step, with functional ops (ONNX, TensorRT), whose new KV tensors are outputs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trtspec.backends.graph_io import INPUTS, graph_inputs, graph_outputs, input_names, output_names, step_inputs
from trtspec.config.speculation_plan import SpeculationPlan, scheduled_draft_lens
from trtspec.core import AttnMetadata, KVLayer, LogitConstraints, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.step import Step
from trtspec.sampling_params import RequestSampling


class GraphStep(nn.Module):
    """A step that takes only tensors as arguments.

    Two numbers are constants of the graph: `next_draft_len`, the K' drafts that it makes for the next step, and
    `width`. A uniform graph has width = K + 1 rows per request, a ragged graph has width = 0.
    """

    def __init__(self, step: Step, next_draft_len: int, width: int) -> None:
        super().__init__()
        self.step = step
        self.next_draft_len = next_draft_len
        self.width = width

    def forward(
        self, tensors: dict[str, Tensor], kv: list[KVLayer]
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the step's outputs by name (output_names), and the new KV layers of a functional step (else none).

        tensors: inputs by name, as listed by input_names.
        """
        kv = list(kv)
        old = list(kv)
        inputs = step_inputs(tensors, self.next_draft_len, self.width)
        outputs = self.step(inputs, kv)
        changed = [new for new, before in zip(kv, old, strict=True) if new is not before]
        return graph_outputs(outputs, output_names(self.step, inputs.spec.constraints is not None)), changed


def moved(value: Any, device: torch.device) -> Any:
    """Return a step value with all of its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def example_batch(draft_len: int, block_size: int, uniform: bool = False, words: int = 0) -> StepInputs:
    """Return a batch of two generations with `draft_len` drafts each and, unless uniform, two contexts.

    Every dynamic size is thus two or more. words: of a mask of the vocabulary; 0 = without constraints on the logits.
    """
    K, C = draft_len, 0 if uniform else 2
    q_lens, kv_lens = [*[3, 2][:C], K + 1, K + 1], [*[3, 6][:C], K + 9, K + 12]
    blocks = -(-max(kv_lens) // block_size) + 1
    attn = AttnMetadata.of(q_lens, kv_lens, [[1 + b * blocks + i for i in range(blocks)] for b in range(C + 2)])
    starts = attn.cu_q_lens.tolist()
    gather = [*(start - 1 for start in starts[1 : C + 1]), *range(starts[C], starts[-1])]
    positions = (attn.positions(starts[-1])[gather] + 1).tolist()
    how = RequestSampling(
        greedy=False, temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, seed=1, ban_ids=(1, 2), ban_until=1
    )
    spec = replace(
        SpecMetadata.plain((), attn, SamplingTensors.of([how] * len(gather), positions)),
        gather_ids=torch.tensor(gather),
        draft_tokens=torch.zeros(2, K, dtype=torch.int64),
        draft_lens=torch.tensor([*[0, 0][:C], K, K], dtype=torch.int32),
        next_prompt_token=torch.tensor([*[-1, 3][:C], -1, -1]),
        next_draft_len=K,
        constraints=_example_constraints(len(gather), words) if words else None,
    )
    return StepInputs(torch.ones(starts[-1], dtype=torch.int64), attn, spec)


def _example_constraints(rows: int, words: int) -> LogitConstraints:
    """Return constraints with every group in use; sizes that are to stay dynamic separately differ from each other."""
    return LogitConstraints(
        history=torch.zeros(rows, words + 1, dtype=torch.int32),
        prompt_lens=torch.ones(rows, dtype=torch.int64),
        penalties=torch.ones(rows, 3),
        bias_ids=torch.zeros(rows, 2, dtype=torch.int32),
        bias_values=torch.zeros(rows, 2),
        allow_mask=torch.full((rows, words), -1, dtype=torch.int32),
    )


def example_for(
    step: Step, draft_len: int, block_size: int, uniform: bool = False, constraints: bool = False
) -> StepInputs:
    """Return a batch with which the step's graph of K = draft_len is exported.

    For most steps this is example_batch. Draft layers outside the target's graph get a batch without drafts, in which
    `draft_len` drafts are to be made. Its rows have the target's hidden states if the layers read any.
    """
    if step.verifies_drafts or not step.makes_drafts:
        words = max(4, -(-step.vocab_size // 32))  # of a small vocabulary more than it has, as sizes must differ
        example = example_batch(draft_len, block_size, uniform, words if constraints else 0)
        if step.takes_trees:
            chains = torch.arange(-1, draft_len - 1).expand(2, draft_len).contiguous()
            example = replace(example, spec=replace(example.spec, draft_parents=chains))
        return example
    example = example_batch(0, block_size)
    states = step.like.new_zeros(example.input_ids.shape[0], step.hidden_width) if step.hidden_width else None
    return replace(example, spec=replace(example.spec, next_draft_len=draft_len), hidden_states=states)


def example_kv(step: Step, example: StepInputs, block_size: int) -> list[KVLayer]:
    """Return empty KV layers for an example, on the device of the step."""
    blocks, new = int(example.attn.block_tables.max()) + 1, step.like.new_zeros
    shapes = [(blocks, block_size, heads, size) for heads, size, _ in step.kv_layers]
    return [(new(shape), new(shape)) for shape in shapes]


def graph_draft_lens(step: Step, spec_plan: SpeculationPlan | None) -> tuple[int, ...]:
    """K of the graphs that a step needs: every draft length that a schedule can ask for.

    (0,) if the step neither makes nor verifies drafts. K = 0 is also needed of draft layers outside the target's graph,
    because they prefill prompts without drafting, and of the target next to them.
    """
    if spec_plan is None or not (step.makes_drafts or step.verifies_drafts):
        return (0,)
    lengths = scheduled_draft_lens(spec_plan)
    if not (step.makes_drafts and step.verifies_drafts):
        lengths.add(0)
    return tuple(sorted(lengths))


def export_step(step: Step, example: StepInputs, kv: Sequence[KVLayer], uniform: bool = False) -> ExportedProgram:
    """Export the step as a graph whose fixed sizes are those of `example`.

    Call it as `program.module()(graph_inputs(inputs, input_names(step, uniform)), list(kv))`. The graph takes
    group_tables and constraints if the example has them.

    Fixed: K, K', and the set of sampling fields in use (not zero-size). Dynamic: B, T, G, the widths of block tables,
    ban lists and constraints (0 is allowed), and the number of KV blocks. A uniform graph has T = B * (K + 1) rows for
    B generations. The example needs at least two generations, and two contexts unless uniform: torch.export treats a
    size of 0 or 1 as a constant.
    """
    names = input_names(step, uniform, example.attn.group_tables is not None, example.spec.constraints is not None)
    tensors = graph_inputs(example, names)
    width = example.spec.runtime_draft_len + 1 if uniform else 0
    module = GraphStep(step, example.spec.next_draft_len, width)
    return export(module, (tensors, list(kv)), (open_shapes(tensors, open_sizes(width)), kv_shapes(len(kv))))


def export(module: nn.Module, arguments: tuple[Any, ...], shapes: tuple[Any, ...]) -> ExportedProgram:
    """Export `module` with these example arguments. shapes: dynamic_shapes of torch.export, one for each argument."""
    with torch.no_grad():
        return torch.export.export(module.eval(), arguments, dynamic_shapes=shapes, strict=False)


_OPEN = {  # name of a dynamic size -> (least, largest)
    "B": (1, 4096),
    "G": (0, 4096),
    "T": (1, 2**20),
    "R": (1, 2**16),
    **dict.fromkeys(("columns", "group_columns", "bans"), (1, 2**16)),
    **dict.fromkeys(("known", "kinds", "biases", "words"), (0, 2**20)),  # sizes of constraints
}


def open_sizes(width: int = 0) -> dict[str, Any]:
    """Return the dynamic sizes by name, for a graph with `width` rows per request; width = 0: for a ragged graph."""
    dims: dict[str, Any] = {name: Dim(name, min=least, max=most) for name, (least, most) in _OPEN.items()}
    if width:
        dims["T"] = dims["R"] = dims["B"] if width == 1 else width * dims["B"]
    return dims


def open_shapes(tensors: Mapping[str, Tensor], dims: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic shapes of a graph's inputs.

    The sizes of an unused input (no elements) are fixed. The number of bans is fixed if it is one per row.
    """

    def shape(name: str, tensor: Tensor) -> dict[int, Any] | None:
        if not tensor.shape[0]:
            return None
        sizes = zip(INPUTS[name].dims, tensor.shape, strict=True)
        return {axis: dims[dim] for axis, (dim, size) in enumerate(sizes) if dim in dims and size > (dim == "bans")}

    return {name: shape(name, tensor) for name, tensor in tensors.items()}


def kv_shapes(num_layers: int) -> list[Any]:
    """Return the dynamic shapes of KV layers, in which the number of blocks is dynamic."""
    blocks = Dim("blocks", min=2, max=2**24)
    return [({0: blocks}, {0: blocks})] * num_layers
