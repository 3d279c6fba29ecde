"""Stand-ins for layers that move numbers: slices, gathers, shapes.

The sources are the docstrings of TensorRT's bindings and its operator reference (docs.nvidia.com, TensorRT operators).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_tensorrt.api import ENUMS, DataType
from tests.fake_tensorrt.arithmetic import Constant
from tests.fake_tensorrt.layer import INTEGERS, Described, FakeLayer, FakeTensor, broadcast, known, one_dtype


class Concatenation(FakeLayer):
    takes = ("inputs",)

    def _describe(self, *parts: FakeTensor) -> list[Described]:
        axis = self._settings.get("axis", max(len(parts[0].shape) - 3, 0))
        if len({len(part.shape) for part in parts}) != 1 or not 0 <= axis < len(parts[0].shape):
            self._refuse(f"axis {axis} of {[part.shape for part in parts]}")
        sizes = [part.shape[axis] for part in parts]
        rest = broadcast(self, *(part.shape[:axis] + part.shape[axis + 1 :] for part in parts))
        total = -1 if -1 in sizes else sum(sizes)
        return [(one_dtype(self, *parts), (*rest[:axis], total, *rest[axis:]))]

    def _known(self) -> list[int]:
        return [number for part in self._given for number in known(part)]  # type: ignore[arg-type]

    def _value(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self._settings["axis"])


class Slice(FakeLayer):
    sizes = (1, 2, 3)

    def _vectors(self) -> list[list[int]]:
        """Start, size and stride; -1 for a value that is not known before the run."""
        fixed = [list(self._arguments[name]) for name in ("start", "shape", "stride")]
        given = [*self._given[1:4], None, None, None][:3]
        return [known(tensor) if tensor is not None else vector for tensor, vector in zip(given, fixed, strict=True)]

    def _describe(self, x: FakeTensor, *more: FakeTensor | None) -> list[Described]:
        start, size, stride = self._vectors()
        if {len(start), len(size), len(stride)} != {len(x.shape)}:
            self._refuse(f"{start}, {size}, {stride} of {x.shape}")
        fills = self._settings.get("mode") == ENUMS["SampleMode"].FILL
        fill = more[3] if len(more) > 3 else None
        if fill is not None and (not fills or fill.dtype != x.dtype or fill.shape):
            self._refuse("input 4 is for the fill mode, a scalar of the input's dtype")
        return [(x.dtype, tuple(size))]

    def _value(self, x: Tensor, *more: Tensor | None) -> Tensor:
        given = [*more[:3], None, None, None][:3]
        fixed = [self._arguments[name] for name in ("start", "shape", "stride")]
        start, size, stride = (
            [int(n) for n in (vector if tensor is None else tensor.tolist())]
            for tensor, vector in zip(given, fixed, strict=True)
        )
        fill = more[3] if len(more) > 3 else None
        inside = torch.ones((), dtype=torch.bool)
        for axis, (first, length, step) in enumerate(zip(start, size, stride, strict=True)):
            if length < 0:
                self._refuse(f"a size of {length}")
            index = first + torch.arange(length) * step
            ok = (index >= 0) & (index < x.shape[axis])
            if fill is None and not bool(ok.all()):
                self._refuse(f"{start}, {size}, {stride} leave {tuple(x.shape)}")
            if x.shape[axis] == 0:
                x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, 1])
            x = x.index_select(axis, index.clamp(0, x.shape[axis] - 1))
            inside = inside & ok.view([-1 if i == axis else 1 for i in range(x.ndim)])
        return x if fill is None else torch.where(inside, x, fill)


class Scatter(FakeLayer):
    takes = ("data", "indices", "updates")

    def _describe(self, data: FakeTensor, indices: FakeTensor, updates: FakeTensor) -> list[Described]:
        if self._settings["mode"].name != "ELEMENT" or indices.dtype not in INTEGERS:
            self._refuse(f"mode {self._settings['mode'].name}, indices of {indices.dtype.name}")
        if len({len(one.shape) for one in (data, indices, updates)}) != 1:
            self._refuse(f"{data.shape}, {indices.shape}, {updates.shape}")
        return [(one_dtype(self, data, updates), data.shape)]

    def _value(self, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        return data.scatter(self._settings.get("axis", 0), indices.long(), updates)


class Gather(FakeLayer):
    takes = ("input", "indices")

    def _mode(self) -> str:
        return str(self._settings.get("mode", ENUMS["GatherMode"].DEFAULT).name)

    def _describe(self, x: FakeTensor, indices: FakeTensor) -> list[Described]:
        axis, mode = self._settings.get("axis", 0), self._mode()
        if indices.dtype not in INTEGERS or not 0 <= axis < len(x.shape) or self._settings.get("num_elementwise_dims"):
            self._refuse(f"indices of {indices.dtype.name}, axis {axis} of {x.shape}")
        if mode == "ELEMENT":
            if len(indices.shape) != len(x.shape):
                self._refuse(f"indices {indices.shape} of {x.shape}")
            return [(x.dtype, indices.shape)]
        if mode == "ND":
            depth = indices.shape[-1]
            if not 1 <= depth <= len(x.shape):
                self._refuse(f"indices {indices.shape} of {x.shape}")
            return [(x.dtype, (*indices.shape[:-1], *x.shape[depth:]))]
        return [(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]

    def _value(self, x: Tensor, indices: Tensor) -> Tensor:
        axis, mode, indices = self._settings.get("axis", 0), self._mode(), indices.long()
        limit = torch.tensor(x.shape[: indices.shape[-1]]) if mode == "ND" else x.shape[axis]
        if bool(((indices < 0) | (indices >= limit)).any()):
            self._refuse(f"indices {indices.flatten().tolist()} of {tuple(x.shape)}")
        if mode == "ELEMENT":
            return x.gather(axis, indices)
        if mode == "ND":
            return x[tuple(indices.unbind(-1))]
        return x.index_select(axis, indices.flatten()).view(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


class Shuffle(FakeLayer):
    sizes = (1,)

    def _describe(self, x: FakeTensor, shape: FakeTensor | None = None) -> list[Described]:
        turned = tuple(x.shape[axis] for axis in self._settings.get("first_transpose", range(len(x.shape))))
        wanted = known(shape) if shape is not None else list(self._settings.get("reshape_dims", turned))
        if self._settings.get("zero_is_placeholder", True):
            wanted = [x.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
        if -1 in wanted and -1 not in x.shape and 0 not in wanted:
            wanted[wanted.index(-1)] = math.prod(x.shape) // -math.prod(wanted)
        return [(x.dtype, tuple(wanted))]

    def _value(self, x: Tensor, shape: Tensor | None = None) -> Tensor:
        x = x.permute(self._settings.get("first_transpose", tuple(range(x.ndim))))
        wanted = shape.tolist() if shape is not None else list(self._settings.get("reshape_dims", x.shape))
        if self._settings.get("zero_is_placeholder", True):
            wanted = [x.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
        return x.reshape(wanted)


class Squeeze(FakeLayer):
    takes = ("input", "axes")

    def _describe(self, x: FakeTensor, axes: FakeTensor) -> list[Described]:
        gone = {axis % len(x.shape) for axis in known(axes)}
        if not isinstance(axes._layer, Constant) or any(x.shape[axis] != 1 for axis in gone):
            self._refuse(f"axes {gone} of {x.shape}")
        return [(x.dtype, tuple(size for i, size in enumerate(x.shape) if i not in gone))]

    def _value(self, x: Tensor, axes: Tensor) -> Tensor:
        return x.squeeze(tuple(axes.tolist()))


class Unsqueeze(FakeLayer):
    takes = ("input", "axes")

    def _describe(self, x: FakeTensor, axes: FakeTensor) -> list[Described]:
        rank = len(x.shape) + axes.shape[0]
        new, old = {axis % rank for axis in known(axes)}, iter(x.shape)
        if not isinstance(axes._layer, Constant) or len(new) != axes.shape[0]:
            self._refuse(f"axes {new}")
        return [(x.dtype, tuple(1 if i in new else next(old) for i in range(rank)))]

    def _value(self, x: Tensor, axes: Tensor) -> Tensor:
        return x.reshape([1 if size < 0 else x.shape[size] for size in self._places(x.ndim, axes.tolist())])

    @staticmethod
    def _places(rank: int, axes: list[int]) -> list[int]:
        total = rank + len(axes)
        new, old = {axis % total for axis in axes}, iter(range(rank))
        return [-1 if i in new else next(old) for i in range(total)]


class Fill(FakeLayer):
    takes = ()
    sizes = (0,)

    def _describe(self, shape: Any = None, alpha: Any = None, beta: Any = None) -> list[Described]:
        dtype = self._settings.get("output_type", DataType.FLOAT)
        if self._settings["op"].name != "LINSPACE" or dtype not in {*INTEGERS, DataType.FLOAT}:
            self._refuse(f"{self._settings['op']} of {dtype.name}")
        if (alpha is None) != (beta is None):
            if len(self._given) == 3:
                self._refuse("alpha and beta must both be inputs, or none")
        elif alpha is not None and ({alpha.dtype, beta.dtype} != {dtype} or alpha.shape != () or beta.shape != (1,)):
            self._refuse(f"alpha {alpha.dtype}{alpha.shape}, beta {beta.dtype}{beta.shape}")
        return [(dtype, tuple(known(shape)) if shape is not None else tuple(self._settings["shape"]))]

    def _value(self, shape: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        return alpha + beta * torch.arange(int(shape[0]), dtype=alpha.dtype)
