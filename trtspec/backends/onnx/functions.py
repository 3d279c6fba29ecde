"""Model-local ONNX functions: reference bodies of trtspec's ops, so that ONNX Runtime runs a step's graph on any CPU.

A node of domain `trtspec` may leave out optional inputs, but a function cannot test whether it was given an input. So
a body is written for each set of absent inputs that occurs, such as `SpecSample_without_seeds`, and the node is renamed
to it. (ONNX has overloads for this, but ONNX Runtime 1.31 does not find them from within other functions.) An optional
input that is present but zero-size counts as absent, as it does for the ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper

from trtspec.backends.onnx.attention import kv_compact, spec_attention
from trtspec.backends.onnx.builder import DOMAIN, OPSET
from trtspec.backends.onnx.sampling import process_logits, spec_accept, spec_sample
from trtspec.errors import UnsupportedError

VERSION = 1
"""Version of domain `trtspec`."""

_WRITERS: dict[str, Callable[..., FunctionProto]] = {
    "SpecAttention": spec_attention,
    "KvCompact": kv_compact,
    "ProcessLogits": process_logits,
    "SpecSample": spec_sample,
    "SpecAccept": spec_accept,
}

_GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SpecAttention": (("tree_mask",), ("sinks",), ("tree_base", "ancestors")),
    "ProcessLogits": (
        ("history", "prompt_lens", "penalties"),
        ("bias_ids", "bias_values"),
        ("ban_ids", "ban_until"),
        ("allow_mask",),
        ("temperatures",),
        ("top_ks",),
        ("top_ps",),
        ("min_ps",),
    ),
    "SpecSample": (("seeds",), ("vocab_ids",)),
}
"""Op -> its optional inputs in groups. The inputs of a group are all present or all absent."""


@functools.cache
def function(op_type: str, absent: frozenset[str] = frozenset()) -> FunctionProto:
    """Return the body of an op for nodes without the inputs `absent`. It is cached, so callers must not change it."""
    return _WRITERS[op_type](absent) if absent else _WRITERS[op_type]()


def functions() -> list[FunctionProto]:
    """Return a body, with all inputs, of SpecAttention, KvCompact, ProcessLogits, SpecSample and SpecAccept."""
    return [function(op_type) for op_type in _WRITERS]


def with_bodies(model: ModelProto) -> ModelProto:
    """Return a copy of a model with a body for every node of domain `trtspec`, for onnxruntime.InferenceSession.

    Weights in external files stay there. Raises UnsupportedError for a node that has no body or lacks an input, and for
    a main opset below 21.
    """
    opset = max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=0)
    if opset < OPSET:
        raise UnsupportedError(
            f"ONNX functions: the model's opset is {opset}, the bodies of trtspec's ops need {OPSET} or newer; "
            f"export it with opset_version={OPSET}"
        )
    out = ModelProto()
    out.CopyFrom(model)
    bodies: dict[str, FunctionProto] = {}
    for nodes in (out.graph.node, *(one.node for one in out.functions)):
        for node in _of_domain(nodes):
            body = _choose(node)
            bodies[body.name] = body
    for key in sorted(bodies):
        body = out.functions.add()
        body.CopyFrom(bodies[key])
        body.opset_import[0].version = opset  # bodies become part of a graph, which has one opset
    if bodies and not any(one.domain == DOMAIN for one in out.opset_import):
        out.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return out


def _choose(node: NodeProto) -> FunctionProto:
    """Return the body for a node. The node is changed to name the body and to list only the inputs that are present."""
    where = f"ONNX functions: node {node.name!r} ({node.op_type})"
    if node.op_type not in _WRITERS:
        raise UnsupportedError(f"{where} of domain {DOMAIN} has no body here; known are {', '.join(_WRITERS)}")
    names = function(node.op_type).input
    given = {name for name, value in zip(names, node.input, strict=False) if value}
    absent = frozenset(names) - given
    for group in _GROUPS.get(node.op_type, ()):
        if not given & set(group):
            absent -= set(group)
    if absent:
        raise UnsupportedError(f"{where} lacks its input {', '.join(sorted(absent))}")
    body = function(node.op_type, frozenset(names) - given)
    node.input[:] = [value for value in node.input if value]
    node.op_type = body.name
    return body


def _of_domain(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes of domain `trtspec` among `nodes` and in their subgraphs."""
    for node in nodes:
        if node.domain == DOMAIN:
            yield node
        for graph in _subgraphs(node):
            yield from _of_domain(graph.node)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs
