"""The stand-in for INetworkDefinition: it records layers, checks them, and computes their documented results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tests.fake_tensorrt import arithmetic, attention, moves
from tests.fake_tensorrt.api import TORCH, DataType, Misuse, Stand, Weights, _members, bind
from tests.fake_tensorrt.layer import FakeLayer, FakeTensor

LAYERS: dict[str, type[FakeLayer]] = {
    "add_activation": arithmetic.Activation,
    "add_attention_v2": attention.Attention,
    "add_cast": arithmetic.Cast,
    "add_concatenation": moves.Concatenation,
    "add_constant": arithmetic.Constant,
    "add_cumulative": arithmetic.Cumulative,
    "add_dequantize": arithmetic.Dequantize,
    "add_elementwise": arithmetic.ElementWise,
    "add_fill": moves.Fill,
    "add_gather": moves.Gather,
    "add_gather_v2": moves.Gather,
    "add_identity": arithmetic.Identity,
    "add_kv_cache_update": attention.KVCacheUpdate,
    "add_matrix_multiply": arithmetic.MatrixMultiply,
    "add_plugin_v3": arithmetic.Plugin,
    "add_quantize": arithmetic.Quantize,
    "add_reduce": arithmetic.Reduce,
    "add_scatter": moves.Scatter,
    "add_select": arithmetic.Select,
    "add_shape": arithmetic.Shape,
    "add_shuffle": moves.Shuffle,
    "add_slice": moves.Slice,
    "add_squeeze": moves.Squeeze,
    "add_unary": arithmetic.Unary,
    "add_unsqueeze": moves.Unsqueeze,
}
"""Method of INetworkDefinition -> layer."""


class FakeNetwork(Stand):
    """An INetworkDefinition."""

    _cls = "INetworkDefinition"

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags
        self._layers: list[Any] = []
        self._inputs: list[FakeTensor] = []
        self._outputs: list[FakeTensor] = []
        self._weights: dict[str, Weights] = {}  # those that have names
        self._refittable: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in LAYERS and name in _members(self._cls, "methods"):
            return lambda *args, **kwargs: self._add(name, LAYERS[name], bind(self._cls, name, args, kwargs))
        return super().__getattr__(name)

    def _add(self, method: str, kind: Any, arguments: dict[str, Any]) -> Any:
        [gives] = {overload["gives"] for overload in _members(self._cls, "methods")[method]}
        layer = kind(gives, arguments)
        self._layers.append(layer)
        return layer

    def _add_input(self, name: str, dtype: Any, shape: Sequence[int]) -> FakeTensor:
        if name in {tensor.name for tensor in self._inputs}:
            raise Misuse(f"two inputs {name}")
        tensor = FakeTensor(None, 0, DataType(dtype), tuple(int(size) for size in shape))
        tensor.name = name
        self._inputs.append(tensor)
        return tensor

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def _get_input(self, index: int) -> FakeTensor:
        return self._inputs[index]

    def _mark_output(self, tensor: FakeTensor) -> None:
        if tensor._role:
            raise Misuse(f"{tensor.name} is already an {tensor._role}")
        tensor._role = "output"
        self._outputs.append(tensor)

    def _set_weights_name(self, weights: Weights, name: str) -> bool:
        if name in self._weights:
            raise Misuse(f"two weights {name}")
        self._weights[name] = weights
        return True

    def _mark_weights_refittable(self, name: str) -> bool:
        if name not in self._weights:
            raise Misuse(f"there are no weights {name}")
        self._refittable.add(name)
        return True

    def _copy_weights(self) -> None:
        """Copy weights from the memory that constants refer to, which may be freed afterwards."""
        for layer in self._layers:
            if isinstance(layer, arithmetic.Constant):
                layer._copy = layer._value()

    def _constants(self) -> dict[str, Any]:
        """The layers of refittable weights, by name."""
        layers = {id(one._arguments["weights"]): one for one in self._layers if isinstance(one, arithmetic.Constant)}
        return {name: layers[id(self._weights[name])] for name in self._refittable}

    def _check(self) -> None:
        """Check every layer's dtypes and shapes."""
        for layer in self._layers:
            layer._infer()
            if isinstance(layer, attention.KVCacheUpdate):
                layer._check_ends()

    def _aliases(self) -> dict[str, str]:
        """Output -> the input whose memory it shares, through any number of plugins."""
        found = {}
        for output in self._outputs:
            tensor = output
            while tensor._layer is not None and (source := tensor._layer._aliased(tensor._index)) is not None:
                tensor = source
            if tensor is not output and tensor._layer is None:
                found[output.name] = tensor.name
        return found

    def _run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each output. Layers are computed in the order in which they were added."""
        values: dict[int, Tensor] = {}
        for tensor in self._inputs:
            given = inputs[tensor.name]
            fits = len(given.shape) == len(tensor.shape) and all(
                a in (b, -1) for a, b in zip(tensor.shape, given.shape, strict=True)
            )
            if not fits or given.dtype != TORCH[tensor.dtype]:
                raise Misuse(f"{tensor.name} is {tensor.dtype}{tensor.shape}, not {given.dtype}{tuple(given.shape)}")
            values[id(tensor)] = given
        for layer in self._layers:
            made = layer._compute([None if one is None else values[id(one)] for one in layer._given])
            for index, (value, (kind, shape)) in enumerate(zip(made, layer._infer(), strict=True)):
                if value.dtype != TORCH[kind] or [
                    a for a, b in zip(value.shape, shape, strict=True) if b not in (a, -1)
                ]:
                    raise Misuse(f"{layer.name}: {value.dtype}{tuple(value.shape)} was to be {kind}{shape}")
                values[id(layer._get_output(index))] = value
        return {tensor.name: values[id(tensor)] for tensor in self._outputs}
