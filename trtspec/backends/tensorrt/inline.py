"""Replace our ops in a step's graph by their bodies of standard operators, for networks without plugins."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir
from onnx import FunctionProto
from onnx_ir.passes.common import IdentityEliminationPass, InlinePass, LiftConstantsToInitializersPass

from trtspec.backends.onnx.export import DOMAIN, given_inputs
from trtspec.backends.onnx.sampling import spec_accept
from trtspec.backends.tensorrt.draws import process_logits, spec_sample
from trtspec.errors import UnsupportedError

_BODIES: dict[str, Callable[[Collection[str]], FunctionProto]] = {
    "ProcessLogits": process_logits,
    "SpecSample": spec_sample,
    "SpecAccept": lambda absent: spec_accept(),
}
"""Op -> function (inputs that a node does not have) -> its body."""


def inline_ops(model: ir.Model) -> None:
    """Replace, in place, every node of domain `trtspec` except SpecAttention.

    UnsupportedError for a node without such a body.
    """
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type != "SpecAttention":
            _name_body(model, node)
    inline_functions(model)


def inline_functions(model: ir.Model) -> None:
    """Replace, in place, calls of a model's functions by their nodes, with constants as initialisers."""
    InlinePass()(model)
    IdentityEliminationPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _name_body(model: ir.Model, node: ir.Node) -> None:
    """Name the body of a node, and leave it the inputs of the body. The body is added to the model's functions."""
    if node.op_type not in _BODIES:
        raise UnsupportedError(
            f"TensorRT-RTX: node {node.name!r} ({node.op_type}) has no body of TensorRT's own layers; use another "
            "quantization, or none"
        )
    given = given_inputs(node)
    every = _BODIES[node.op_type](())
    if strange := given.keys() - set(every.input):
        raise UnsupportedError(
            f"TensorRT-RTX: node {node.name!r} ({node.op_type}) takes {', '.join(sorted(strange))}, which has no body "
            "of TensorRT's own layers; please report this"
        )
    body = ir.serde.deserialize_function(_BODIES[node.op_type](set(every.input) - given.keys()))
    model.functions.setdefault(body.identifier(), body)
    for index, name in enumerate(body.inputs):
        node.replace_input_with(index, given[str(name.name)])
    node.resize_inputs(len(body.inputs))
    node.op_type = body.name
