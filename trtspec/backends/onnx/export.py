"""A step as an ONNX graph: standard operators, and nodes of the domain `trtspec` where the step calls one of our ops.

An op becomes a node whose name is the op's name in CamelCase. Its tensors are inputs in the order of the op's schema,
and its numbers are attributes. A tensor that the step leaves unused (no elements) is left out as an input. The contract
of a node is that of the op in `trtspec.ops`. TensorRT's parser finds a plugin for each node. ONNX Runtime gets the
bodies of functions.py. Linears are written with standard operators, in the form that suits each runtime (linear.py).

The step must be functional: its new KV tensors are outputs, `new_k_cache_<layer>` for the input `k_cache_<layer>`.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import values
from torch.export import ExportedProgram

from trtspec.backends.export import export_step
from trtspec.backends.graph_io import INPUTS, input_names, output_names
from trtspec.core import KVLayer, StepInputs
from trtspec.methods.step import Step

DOMAIN = "trtspec"
OWN = "step."
"""Prefix of the names of a step's own constants (GraphStep.step), which are the same in all its graphs."""
OPSET = 21
"""Opset of the standard operators: the first whose DequantizeLinear takes blocks of 4-bit weights."""

OPS = (
    "spec_attention", "kv_compact", "process_logits", "spec_sample", "spec_accept", "packed_linear", "packed_embedding",
    "quantize_groups", "groups_linear",
)  # fmt: skip
_IR_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
}
_NEEDED = ("draft_tokens",)
"""Inputs that are kept even if they never have elements: [B, 0] of a step without drafts provides B."""
_TYPES = ("float", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "float8e4m3fn", "bool")


def export_onnx(step: Step, example: StepInputs, kv: Sequence[KVLayer], uniform: bool = False) -> ir.Model:
    """Return the graph of `export_step` as ONNX. Inputs that no node reads (a tree mask) are left out.

    Constants have the names of the step's state_dict and refer to torch's memory without a copy.
    """
    program = export_step(step, example, kv, uniform)
    constraints = example.spec.constraints is not None
    names = input_names(step, uniform, constraints=constraints)
    layers = range(len(kv))
    inputs = [*names, *(f"{part}_cache_{i}" for i in layers for part in "kv")]
    outputs = [*output_names(step, constraints), *(f"new_{part}_cache_{i}" for i in layers for part in "kv")]
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=_translations(),
            input_names=inputs,
            output_names=outputs,
            optimize=True,
            verbose=False,
        )
    assert exported is not None
    model = exported.model
    _type_results(model, program)
    _name_sizes(model)
    for value in [value for value in model.graph.inputs if not value.uses()]:
        model.graph.inputs.remove(value)
    return model


@functools.cache
def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return torch overload -> function that writes its ONNX node, for each of our ops."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name in OPS:
        overload = getattr(torch.ops.trtspec, name).default
        table[overload] = _translation(node_type(name), overload._schema)
    table[torch.ops.aten.sort.stable] = _stable_sort
    return table


def _stable_sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Write a stable sort, which the exporter lacks: of equal values, TopK takes that of the lowest index first."""
    standard = values.Opset("", OPSET)
    size = standard.Gather(standard.Shape(self), [dim])
    return standard.TopK(self, size, axis=dim, largest=int(descending), sorted=1, _outputs=2)


def node_type(op: str) -> str:
    """Name of the node type of an op: spec_attention -> SpecAttention."""
    return op.title().replace("_", "")


def _translation(kind: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
    tensors = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    numbers = [argument for argument in schema.arguments if "Tensor" not in str(argument.type)]
    _register(kind, tensors, numbers, len(schema.returns))
    node = getattr(values.Opset(DOMAIN, 1), kind)

    def write(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        inputs = [given[one.name] if one.name in _NEEDED else _unless_empty(given.get(one.name)) for one in tensors]
        while inputs[-1] is None:
            inputs.pop()
        attributes = {argument.name: given[argument.name] for argument in numbers}
        attributes = {name: int(value) if isinstance(value, bool) else value for name, value in attributes.items()}
        return node(*inputs, **attributes, _outputs=len(schema.returns))

    return write


def _register(kind: str, tensors: Sequence[Any], numbers: Sequence[Any], num_outputs: int) -> None:
    """Register the schema of a node with onnx, once per process."""
    if onnx.defs.has(kind, domain=DOMAIN):
        return
    Schema = onnx.defs.OpSchema
    kinds = {"float": Schema.AttrType.FLOAT, "int": Schema.AttrType.INT, "bool": Schema.AttrType.INT}
    outputs = [f"out_{i}" for i in range(num_outputs)]
    constraints = [
        (f"T_{name}", [f"tensor({t})" for t in _TYPES], "") for name in (*(t.name for t in tensors), *outputs)
    ]
    onnx.defs.register_schema(
        Schema(
            kind,
            DOMAIN,
            1,
            inputs=[
                Schema.FormalParameter(t.name, f"T_{t.name}", param_option=Schema.FormalParameterOption.Optional)
                for t in tensors
            ],
            outputs=[Schema.FormalParameter(name, f"T_{name}") for name in outputs],
            type_constraints=constraints,
            attributes=[Schema.Attribute(n.name, kinds[str(n.type)], "", required=True) for n in numbers],
        )
    )


def given_inputs(node: ir.Node) -> dict[str, ir.Value]:
    """Return the inputs that a node of domain `trtspec` has, by their names in trtspec.ops."""
    names = [parameter.name for parameter in onnx.defs.get_schema(node.op_type, domain=DOMAIN).inputs]
    return {name: value for name, value in zip(names, node.inputs, strict=False) if value is not None}


def _unless_empty(value: Any) -> Any:
    """Return `value`, or None for a tensor that has no elements in any batch."""
    shape = getattr(value, "shape", None)
    return None if shape is not None and any(size == 0 for size in shape) else value


def _type_results(model: ir.Model, program: ExportedProgram) -> None:
    """Set the dtypes of our nodes' results, as torch traced them, because the exporter cannot know them."""
    calls = {getattr(torch.ops.trtspec, name).default: [] for name in OPS}  # type: dict[Any, list[Any]]
    for traced in program.graph.nodes:
        if traced.target in calls:
            value = traced.meta["val"]
            calls[traced.target].append(value if isinstance(value, (tuple, list)) else [value])
    results = {
        node_type(overload._schema.name.removeprefix("trtspec::")): iter(made) for overload, made in calls.items()
    }
    for node in model.graph:
        if node.domain == DOMAIN:
            for output, result in zip(node.outputs, next(results[node.op_type]), strict=True):
                output.type = ir.TensorType(_IR_TYPES[result.dtype])


def _name_sizes(model: ir.Model) -> None:
    """Give dynamic sizes the names that they have in INPUTS (B, T, R, ...) instead of names such as s17."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        wanted = INPUTS[value.name].dims if value.name in INPUTS else ("blocks",)
        for size, name in zip(value.shape or (), wanted, strict=False):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, name)

    def renamed(size: Any) -> Any:
        if not isinstance(size, ir.SymbolicDim) or size.value is None:
            return size
        return ir.SymbolicDim(re.sub(r"\b[a-z]+\d+\b", lambda found: names.get(found[0], found[0]), size.value))

    nodes = list(model.graph)
    for value in [*model.graph.inputs, *(value for node in nodes for value in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(size) for size in value.shape])


class _quiet:
    """A context manager that lets only errors through a logger and its child loggers."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)
