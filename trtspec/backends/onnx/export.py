"""A step as an ONNX graph: standard operators, and nodes of the domain `trtspec` where the step calls one of our ops.

An op becomes a node by rule: CamelCase of its name, its tensors as inputs in the order of the op's schema, its numbers
as attributes; a tensor that the step leaves unused, of no elements, is an input left out. What a node does is the op's
contract in `trtspec.ops`. TensorRT's parser finds a plugin for each; ONNX Runtime gets the bodies of functions.py.
Linears are written with standard operators, as each runtime likes them (linear.py).

The step must be a functional one: its new KV tensors are outputs, `new_k_cache_<layer>` beside `k_cache_<layer>`.
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
"""How names of a step's own constants begin (GraphStep.step): the same in all its graphs."""
OPSET = 21
"""Of the standard operators: the first whose DequantizeLinear takes blocks of 4-bit weights."""

OPS = (
    "spec_attention", "kv_compact", "process_logits", "spec_sample", "spec_accept", "packed_linear", "packed_embedding",
)  # fmt: skip
_IR_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
}
_NEEDED = ("draft_tokens",)
"""Inputs that stay though they never have elements: [B, 0] of a step without drafts says B."""
_TYPES = ("float", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "float8e4m3fn", "bool")


def export_onnx(step: Step, example: StepInputs, kv: Sequence[KVLayer], uniform: bool = False) -> ir.Model:
    """What `export_step` gives, as ONNX. Inputs that nothing in the graph reads (a tree mask) are left out.

    Constants are named as in the step's state_dict and hold torch's memory: nothing is copied.
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
    """Torch overload -> what writes its node."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name in OPS:
        overload = getattr(torch.ops.trtspec, name).default
        table[overload] = _translation(node_type(name), overload._schema)
    return table


def node_type(op: str) -> str:
    """spec_attention -> SpecAttention"""
    return op.title().replace("_", "")


def _translation(kind: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
    tensors = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    numbers = [argument for argument in schema.arguments if "Tensor" not in str(argument.type)]
    _register(kind, tensors, numbers, len(schema.returns))
    node = getattr(values.Opset(DOMAIN, 1), kind)

    def write(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        inputs = [_unless_empty(given[one.name]) if one.name not in _NEEDED else given[one.name] for one in tensors]
        while inputs[-1] is None:
            inputs.pop()
        attributes = {argument.name: given[argument.name] for argument in numbers}
        attributes = {name: int(value) if isinstance(value, bool) else value for name, value in attributes.items()}
        return node(*inputs, **attributes, _outputs=len(schema.returns))

    return write


def _register(kind: str, tensors: Sequence[Any], numbers: Sequence[Any], num_outputs: int) -> None:
    """Tell onnx of the node, once in a process."""
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


def _unless_empty(value: Any) -> Any:
    """None for a tensor that has no elements whatever the batch."""
    shape = getattr(value, "shape", None)
    return None if shape is not None and any(size == 0 for size in shape) else value


def _type_results(model: ir.Model, program: ExportedProgram) -> None:
    """Say what our nodes' results are made of, as torch traced them: the exporter cannot know."""
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
    """Call open sizes what INPUTS does, B, T, R, ..., instead of s17."""
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
    """Only errors of a logger and those below it."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)
