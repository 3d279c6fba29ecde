"""A step's ONNX graph as a TensorRT network, written layer by layer through INetworkDefinition.

TensorRT's ONNX parser is not used. Its documentation does not promise how it treats int64 sizes, plugin namespaces, and
our nodes, whose optional inputs may be empty. The graphs come from export_onnx, with linears by write_linears(model,
"tensorrt"). They have a small closed set of operators, so a table of operators (ops.py) is enough.

A node of domain `trtspec` becomes a plugin layer. New KV caches are outputs `new_k_cache_<layer>`, which must be bound
to the addresses of the inputs `k_cache_<layer>`. Where several nodes change a cache, one after the other, each one's
new cache aliases its old one. Elsewhere there are no aliases: TensorRT may keep a copy of each cache for them.

No GPU has run such a network. Tests write it into a stand-in with the signatures of TensorRT 11.4's Python bindings,
and compute each layer as documented. NVIDIA's TensorRT-RTX builder builds such networks without their plugins (make
contract-tensorrt-rtx). That does not show that TensorRT 11 takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import onnx_ir as ir

from trtspec.backends.onnx.export import DOMAIN, given_inputs
from trtspec.backends.tensorrt.native import NativeAttention
from trtspec.backends.tensorrt.ops import write_node
from trtspec.backends.tensorrt.writer import Writer
from trtspec.errors import EngineError, UnsupportedError

Attributes = Mapping[str, int | float]
PluginOf = Callable[[str, Collection[str], Attributes, bool], tuple[Any, tuple[str, ...]]]
"""A function (op_type, names of the inputs present, attributes, chained) -> (IPluginV3, names of its inputs in order).

chained: whether another node changes the node's caches as well. LookupError if there is no plugin for them.
"""


def write_network(
    trt: Any, network: Any, model: ir.Model, plugin_of: PluginOf, linear: tuple[int, int] | None = None
) -> Writer:
    """Write `model` into `network`, an empty INetworkDefinition of the module `trt`.

    Return the Writer, which holds the memory of the network's constants: keep it until the engine is built. linear: use
    TensorRT's own attention instead of our plugin, over caches with these numbers of (slots, tokens). UnsupportedError
    for an unknown operator or an op without a plugin, EngineError if TensorRT refuses a layer.
    """
    w = Writer(trt, network)
    for value in model.graph.inputs:
        w.set(value, _input(w, value, linear))
    native = NativeAttention(w, linear[0]) if linear is not None else None
    model.graph.sort()
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "SpecAttention" and native is not None:
            native.write(node)
        elif node.domain == DOMAIN:
            _write_plugin(w, node, plugin_of)
        else:
            write_node(w, node)
    for value in model.graph.outputs:
        _output(w, value)
    return w


def _input(w: Writer, value: ir.Value, linear: tuple[int, int] | None) -> Any:
    """Add an input. Its dynamic sizes are -1. Linear caches have fixed sizes.

    Dynamic sizes get no names, although TensorRT takes names to mark equal sizes: with them, TensorRT-RTX 1.7 fails on
    a chain of three drafts with an internal error (_Map_base::at).
    """
    assert value.shape is not None
    dims = list(value.shape)
    if linear is not None and "_cache_" in str(value.name):
        dims = [linear[0], dims[2], linear[1], dims[3]]
    sizes = [size if isinstance(size, int) else -1 for size in dims]
    tensor = w.network.add_input(str(value.name), w.dtype(value.dtype), tuple(sizes))
    if tensor is None:
        raise EngineError(f"TensorRT refused the input {value.name}; its log says why. Please report this")
    return tensor


def _output(w: Writer, value: ir.Value) -> None:
    tensor = w.get(value)
    if tensor.is_network_input or tensor.is_network_output:  # two names of one tensor
        w.node = f"{value.name}_again"
        tensor = w.out(w.network.add_identity(tensor))
    tensor.name = str(value.name)
    w.network.mark_output(tensor)


def chained(node: ir.Node) -> bool:
    """Whether another node of the graph changes the caches of this one, before it or after it."""
    old = given_inputs(node).get("k_cache")
    return old is not None and (old.producer() is not None or bool(node.outputs[1].uses()))


def _write_plugin(w: Writer, node: ir.Node, plugin_of: PluginOf) -> None:
    w.node = node.name or node.op_type
    tensors = {name: w.get(value) for name, value in given_inputs(node).items()}
    attributes = {
        name: one.as_float() if one.type == ir.AttributeType.FLOAT else one.as_int()
        for name, one in node.attributes.items()
    }
    try:
        plugin, order = plugin_of(node.op_type, list(tensors), attributes, chained(node))
    except LookupError as error:
        raise UnsupportedError(f"{error.args[0]} (node {w.node!r})") from error
    layer = w.network.add_plugin_v3([tensors[name] for name in order], [], plugin)
    w.out(layer)
    for i, output in enumerate(node.outputs):
        w.set(output, layer.get_output(i))
