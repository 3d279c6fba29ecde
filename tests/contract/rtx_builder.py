"""NVIDIA's TensorRT-RTX builder, which makes plans without a GPU, for networks whose plugins it does not have.

A network is cut at each plugin: the inputs of the plugin become outputs of the network, and its outputs become inputs.
So the builder sees every other layer of the network, with the shapes that the plugin declares. `CutTensorRT` stands in
for the module `tensorrt`, and everything else of it is the real module.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import tensorrt_rtx_bindings as rtx

from trtspec.backends.onnx.export import DOMAIN
from trtspec.backends.tensorrt.profiles import Profile, Shape

Range = tuple[Shape, Shape, Shape]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


class Log(rtx.ILogger):
    """A logger that keeps what the builder says; severity is at least WARNING."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= rtx.ILogger.WARNING:
            self.said.append((severity.name, message))

    def errors(self) -> list[str]:
        """What the builder said about errors, each text once."""
        return list(dict.fromkeys(text for severity, text in self.said if "ERROR" in severity))


@dataclass
class _Cut:
    """A plugin layer that is not there: tensors that stand for its outputs."""

    tensors: list[Any]
    name: str = ""

    def get_output(self, index: int) -> Any:
        return self.tensors[index]


@dataclass(frozen=True)
class CutPlugin:
    """A plugin in the network: its name alone."""

    name: str


class CutNetwork:
    """A real INetworkDefinition, cut at plugins. cuts: name of each added input -> sizes of its dimensions.

    A size is a number or an expression of the graph's dynamic sizes.
    """

    def __init__(self, network: Any, nodes: Iterator[ir.Node]) -> None:
        self.real = network
        self.cuts: dict[str, list[int | str]] = {}
        self._nodes = nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def mark_output(self, tensor: Any) -> None:
        if not tensor.is_network_output:
            self.real.mark_output(tensor)

    def add_plugin_v3(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], plugin: CutPlugin) -> _Cut:
        assert not shape_inputs
        node = next(self._nodes)
        for tensor in inputs:
            if not tensor.is_network_input:
                self.mark_output(tensor)
        made = []
        for number, value in enumerate(node.outputs):
            assert value.shape is not None
            name = f"{node.name}_{plugin.name}_{number}"
            sizes = [size if isinstance(size, int) else str(size.value) for size in value.shape]
            fixed = tuple(size if isinstance(size, int) else -1 for size in sizes)
            made.append(self.real.add_input(name, _dtype(value), fixed))
            self.cuts[name] = sizes
        return _Cut(made)


def _plugin_nodes(model: ir.Model, native: bool) -> Iterator[ir.Node]:
    """Nodes of plugins in the order in which write_network writes them."""
    model.graph.sort()
    ours = [node for node in model.graph if node.domain == DOMAIN]
    return iter([node for node in ours if not (native and node.op_type == "SpecAttention")])


def _dtype(value: ir.Value) -> Any:
    assert value.dtype is not None
    kinds = {"FLOAT": rtx.float32, "FLOAT16": rtx.float16, "BFLOAT16": rtx.bfloat16}
    kinds |= {"INT64": rtx.int64, "INT32": rtx.int32}
    return kinds[value.dtype.name]


class CutTensorRT:
    """The module tensorrt, with a builder that cuts one network. log: what the builder said.

    sm: architecture for which it builds, as 89 for SM89. native: attention is TensorRT's own.
    """

    def __init__(self, model: ir.Model, sm: int, native: bool = False) -> None:
        self.model = model
        self.native = native
        self.sm = sm
        self.log = Log()
        self.network: CutNetwork | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(rtx, name)

    def Builder(self, logger: Any) -> Any:
        return _CutBuilder(self, rtx.Builder(self.log))


@dataclass
class _CutBuilder:
    trt: CutTensorRT
    real: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_network(self, flags: int = 0) -> CutNetwork:
        self.trt.network = CutNetwork(self.real.create_network(flags), _plugin_nodes(self.trt.model, self.trt.native))
        return self.trt.network

    def create_builder_config(self) -> Any:
        config = self.real.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(rtx.ComputeCapability, f"SM{self.trt.sm}"), 0)
        return config

    def build_serialized_network(self, network: CutNetwork, config: Any) -> Any:
        return self.real.build_serialized_network(network.real, config)


def cut_plugin_of(
    op: str, present: Collection[str], attributes: Mapping[str, Any], chained: bool
) -> tuple[CutPlugin, tuple[str, ...]]:
    """Return a plugin that is cut, for an op that has one; LookupError as trtspec_plugins.tensorrt says."""
    from trtspec_plugins.tensorrt.signatures import PLUGINS, plugin_of

    name = plugin_of(op, present, chained)
    return CutPlugin(name), PLUGINS[name].inputs


@dataclass
class CutShapes(Mapping[str, Range]):
    """Shapes of a profile, and those of the inputs that cuts add, from the dynamic sizes of the others."""

    profile: Profile
    trt: CutTensorRT
    _sizes: list[dict[str, int]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Range:
        if name in self.profile.shapes:
            return self.profile.shapes[name]
        assert self.trt.network is not None
        dims = self.trt.network.cuts[name]
        sizes = self._sizes or self._read_sizes()
        return tuple(tuple(_value(one, known) for one in dims) for known in sizes)  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        assert self.trt.network is not None
        return iter([*self.profile.shapes, *self.trt.network.cuts])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _read_sizes(self) -> list[dict[str, int]]:
        """The least, usual and largest value of each dynamic size."""
        self._sizes = [{}, {}, {}]
        for value in self.trt.model.graph.inputs:
            assert value.shape is not None
            for shape, known in zip(self.profile.shapes[str(value.name)], self._sizes, strict=True):
                for dim, size in zip(value.shape, shape, strict=True):
                    if not isinstance(dim, int) and str(dim.value).isidentifier():
                        known[str(dim.value)] = size
        return self._sizes


def _value(size: int | str, known: Mapping[str, int]) -> int:
    """Value of a size, which may be an expression of others."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return known[node.id]
        assert isinstance(node, ast.BinOp), f"{size!r} is no sum or product of sizes"
        return int(_OPERATORS[type(node.op)](of(node.left), of(node.right)))

    return size if isinstance(size, int) else of(ast.parse(size, mode="eval").body)
