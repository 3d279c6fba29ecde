"""The common parts of the stand-ins for ITensor and ILayer: dtypes and shapes that follow from those of the inputs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from tests.fake_tensorrt.api import DataType, Misuse, Stand

Described = tuple[Any, tuple[int, ...]]
FLOATS = {DataType.FLOAT, DataType.HALF, DataType.BF16}
INTEGERS = {DataType.INT32, DataType.INT64}


class FakeTensor(Stand):
    """An ITensor: output `_index` of a layer, or an input of the network."""

    _cls = "ITensor"

    def __init__(self, layer: Any, index: int, kind: Any = None, size: tuple[int, ...] = ()) -> None:
        self._layer, self._index, self._kind, self._size = layer, index, kind, size
        self._dimensions: dict[int, str] = {}
        self.name = ""
        self._role = "input" if layer is None else ""

    @property
    def dtype(self) -> Any:
        return self._kind if self._layer is None else self._layer._infer()[self._index][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._size if self._layer is None else self._layer._infer()[self._index][1]  # type: ignore[no-any-return]

    @property
    def is_network_input(self) -> bool:
        return self._role == "input"

    @property
    def is_network_output(self) -> bool:
        return self._role == "output"

    def _set_dimension_name(self, index: int, name: str) -> None:
        self._dimensions[index] = name


class FakeLayer(Stand):
    """An ILayer. takes: arguments of its add_ method that are inputs."""

    takes: ClassVar[tuple[str, ...]] = ("input",)
    sizes: ClassVar[tuple[int, ...]] = ()  # indices of inputs that must be known before any data is

    def __init__(self, cls: str, arguments: dict[str, Any]) -> None:
        self._cls = cls
        self._arguments = arguments
        self._given: list[FakeTensor | None] = []
        for name in self.takes:
            one = arguments.get(name)
            self._given += one if isinstance(one, list) else [one] if one is not None else []
        self._cached: list[Described] | None = None
        self._made: dict[int, FakeTensor] = {}
        self._settings: dict[str, Any] = {
            name: value for name, value in arguments.items() if not isinstance(value, (FakeTensor, list))
        }
        self._infer()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_") and name != "name":
            self._settings[name] = value
            self._cached = None

    def _set_input(self, index: int, tensor: FakeTensor) -> None:
        if not isinstance(tensor, FakeTensor):
            raise Misuse(f"{self._cls}: {tensor!r} is no tensor")
        self._given += [None] * (index + 1 - len(self._given))
        self._given[index] = tensor
        self._cached = None

    def _get_output(self, index: int) -> FakeTensor:
        if index not in self._made:
            if index >= len(self._infer()):
                raise Misuse(f"{self._cls} has no output {index}")
            self._made[index] = FakeTensor(self, index)
        return self._made[index]

    def _infer(self) -> list[Described]:
        if self._cached is None:
            for index in self.sizes:
                if index < len(self._given) and (given := self._given[index]) is not None and not on_host(given):
                    raise Misuse(f"{self._cls} {self.__dict__.get('name')}: input {index} is computed from data")
            self._cached = self._describe(*self._given)
        return self._cached

    def _describe(self, *given: Any) -> list[Described]:
        raise NotImplementedError

    def _compute(self, given: list[Tensor | None]) -> list[Tensor]:
        return [self._value(*given)]

    def _value(self, *given: Any) -> Tensor:
        raise NotImplementedError

    def _known(self) -> list[int]:
        """Values of a vector that are known before any data is; -1 for each unknown one."""
        shape = self._infer()[0][1]
        return [-1] * (shape[0] if shape else 1)

    def _on_host(self) -> bool:
        """Whether its values follow from sizes and constants alone."""
        return all(on_host(one) for one in self._given if one is not None)

    def _aliased(self, index: int) -> FakeTensor | None:
        return None

    def _refuse(self, why: str) -> None:
        raise Misuse(f"{self._cls} {self.__dict__.get('name', '')}: {why}")


def on_host(tensor: FakeTensor) -> bool:
    return tensor._layer is not None and bool(tensor._layer._on_host())


def known(tensor: FakeTensor) -> list[int]:
    return list(tensor._layer._known()) if tensor._layer is not None else [-1] * tensor.shape[0]


def broadcast(layer: FakeLayer, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the broadcast inputs. They must have equal ranks, and each size must be equal or 1."""
    if len({len(shape) for shape in shapes}) != 1:
        layer._refuse(f"inputs of ranks {[len(shape) for shape in shapes]}")
    out = []
    for sizes in zip(*shapes, strict=True):
        others = {size for size in sizes if size not in (1, -1)}
        if len(others) > 1:
            layer._refuse(f"shapes {shapes} do not go together")
        out.append(others.pop() if others else -1 if -1 in sizes else 1)
    return tuple(out)


def one_dtype(layer: FakeLayer, *tensors: FakeTensor) -> Any:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        layer._refuse(f"inputs of {[tensor.dtype.name for tensor in tensors]}")
    return dtypes.pop()
