"""A readable summary, in a few lines, of what a builder was asked to build."""

from __future__ import annotations

from collections import Counter

from tests.fake_tensorrt.arithmetic import Constant, Plugin
from tests.fake_tensorrt.builder import FakeConfig
from tests.fake_tensorrt.layer import FakeLayer, FakeTensor
from tests.fake_tensorrt.network import FakeNetwork


def summary(network: FakeNetwork, config: FakeConfig) -> str:
    """Lines of text: inputs with their profiles, number of layers, each plugin, outputs with aliases, flags."""
    lines = ["inputs: least, usual, largest shape of each profile"]
    for tensor in network._inputs:
        shapes = "; ".join(
            " ".join("x".join(map(str, shape)) or "()" for shape in profile._shapes[tensor.name])
            for profile in config._profiles
        )
        lines.append(f"  {described(tensor)}: {shapes}")
    lines.append("layers")
    counts = Counter(kind(layer) for layer in network._layers if not isinstance(layer, Constant))
    lines += [f"  {count:4} {name}" for name, count in sorted(counts.items())]
    constants = [layer for layer in network._layers if isinstance(layer, Constant)]
    lines.append(f"  {len(constants):4} IConstantLayer, {len(network._weights)} named for a refit")
    lines.append("plugins")
    for layer in network._layers:
        if isinstance(layer, Plugin):
            plugin = layer._settings["plugin"]
            attributes = "".join(f" {name}={value:.6g}" for name, value in plugin.attributes.items())
            lines.append(f"  {plugin.name}{attributes}: {', '.join(shape(t) for t in layer._given)}")
    lines.append("outputs")
    aliases = network._aliases()
    for tensor in network._outputs:
        alias = f" = {aliases[tensor.name]}" if tensor.name in aliases else ""
        lines.append(f"  {tensor.name} {shape(tensor)}{alias}")
    lines.append(f"network flags {network.flags}; preview {', '.join(config._features)}")
    lines.append(f"builder flags: set {', '.join(config._flags) or 'none'}; cleared {', '.join(config._cleared)}")
    return "\n".join(lines) + "\n"


def kind(layer: FakeLayer) -> str:
    """Kind of a layer, such as "IElementWiseLayer SUM INT64"."""
    operation = next((f" {layer._settings[name].name}" for name in ("op", "mode") if name in layer._settings), "")
    if isinstance(layer, Plugin):
        operation = f" {layer._settings['plugin'].name}"
    return f"{layer._cls}{operation} {layer._infer()[0][0].name}"


def shape(tensor: FakeTensor | None) -> str:
    assert tensor is not None
    return f"{tensor.dtype.name}[{','.join('?' if size < 0 else str(size) for size in tensor.shape)}]"


def described(tensor: FakeTensor) -> str:
    """The tensor as text, with the names of open sizes."""
    sizes = [tensor._dimensions.get(i, str(size)) for i, size in enumerate(tensor.shape)]
    return f"{tensor.name} {tensor.dtype.name}[{','.join(sizes)}]"
