"""Weights that are quantised already in the checkpoint: public layouts to ours, value by value, nothing rounded anew.

What a kind of weights is made of is in quantized_integers.py and quantized_fp8.py; here their tensors are gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.weight_schemes import Fp8Scheme, IntegerScheme
from trtspec.errors import TrtSpecError, WeightsError
from trtspec.models.layers import Linear
from trtspec.models.quantized_fp8 import Fp8
from trtspec.models.quantized_integers import Integers
from trtspec.models.quantized_part import Format, Part
from trtspec.models.slots import Slot

logger = logging.getLogger(__name__)


class QuantizedLinears:
    """What of a model's `slots` is quantised in its checkpoint. Linears are packed as soon as their tensors are there.

    plain: the other slots. required, optional: shapes of the quantised linears' tensors, by name. `where` begins
    errors. Raises UnsupportedError for a linear whose weights ours cannot hold as they are.
    """

    def __init__(self, slots: Mapping[str, Slot], quantization: CheckpointQuantization | None, where: str) -> None:
        self.where = where
        self.plain: dict[str, Slot] = {}
        self.required: dict[str, tuple[int, ...]] = {}
        self.optional: dict[str, tuple[int, ...]] = {}
        self._formats: dict[type[Any], Format[Any]] = {IntegerScheme: Integers(), Fp8Scheme: Fp8()}
        self._parts: dict[str, list[Part[Any]]] = {}  # by our parameter
        self._modules: dict[str, Part[Any]] = {}  # by the checkpoint's name
        self._awaited: dict[str, set[str]] = {}  # our parameter, until it is packed -> tensors that may yet come for it
        self._tensors: dict[str, dict[str, Tensor]] = {}  # linear of the checkpoint, not packed yet -> what came for it
        self._kv_scales: set[str] = set()  # where there may be some
        self._has_kv_scales = False
        self._error: TrtSpecError | None = None
        for name, slot in slots.items():
            module, _, kind = name.rpartition(".")
            if quantization is not None and quantization.kv_scales:
                self._kv_scales |= _kv_scales(module)
            linear = kind == "weight" and len(slot.shape) == 2 and not slot.parameter.endswith("embedding.weight")
            scheme = quantization.scheme(module) if quantization is not None and linear else None
            if scheme is None:
                self.plain[name] = slot
                continue
            part, form = Part(module, scheme, slot, where), self._formats[type(scheme)]
            if problem := form.problem(part):
                raise part.unsupported(f"is {scheme}, but {problem}")
            self._parts.setdefault(slot.parameter, []).append(part)
            self._modules[module] = part
            required, optional = (
                {f"{module}.{end}": shape for end, shape in shapes.items()} for shapes in form.shapes(part)
            )
            self.required |= required
            self.optional |= optional
            self._awaited.setdefault(slot.parameter, set()).update(required, optional)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.slot.start)
        self._check_fused()

    def ignorable(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor is spare: early GPTQ writers gave every linear a bias, of zeros where the model has none,
        and scales of keys and values are for caches of another dtype."""
        if name in self._kv_scales:
            self._has_kv_scales = True
            return True
        return self.is_spare(name) and not tensor.any()

    def is_spare(self, name: str) -> bool:
        """Whether a tensor of this name may be one of those."""
        module, _, kind = name.rpartition(".")
        return name in self._kv_scales or (kind == "bias" and module in self._modules)

    def take(self, name: str, tensor: Tensor, into: nn.Module) -> None:
        """One of the tensors, in its right shape. The last one that a linear of the module `into` awaited packs it.

        WeightsError if it is of no fitting dtype.
        """
        module, _, kind = name.rpartition(".")
        part = self._modules[module]
        if wanted := self._format(part).misfit(part, kind, tensor):
            raise WeightsError(f"{self.where}: {name} is {tensor.dtype}, expected {wanted}; download the file again")
        parameter = part.slot.parameter
        awaited = self._awaited.get(parameter)
        if awaited is None:
            return  # another shard has it too, and the linear is packed
        self._tensors.setdefault(module, {})[kind] = tensor
        awaited.discard(name)
        if not awaited:
            self._pack(parameter, into)

    def finish(self, module: nn.Module) -> None:
        """Pack those that have all but an optional tensor, which will not come.

        UnsupportedError or CheckpointError for values nobody can hold, in any linear.
        """
        for parameter in [*self._awaited]:
            self._pack(parameter, module)
        if self._error is not None:
            raise self._error
        for form in self._formats.values():
            form.finish(self.where)
        if self._has_kv_scales:
            logger.warning("%s: scales of an fp8 KV cache are not used, as ours is in the model's dtype", self.where)

    def describe(self, module: nn.Module) -> None:
        """Give the linears of `module` that are quantised the tensors they will hold, on torch's meta device."""
        for parameter, parts in self._parts.items():
            self._format(parts[0]).describe(_linear(module, parameter), parts)

    def num_bytes(self, itemsize: int) -> int:
        """Of all weights once they are loaded, those in floating point at `itemsize` bytes."""
        total = sum(torch.Size(slot.shape).numel() for slot in self.plain.values()) * itemsize
        return total + sum(self._format(parts[0]).num_bytes(parts) for parts in self._parts.values())

    def _format(self, part: Part[Any]) -> Format[Any]:
        return self._formats[type(part.scheme)]

    def _pack(self, parameter: str, module: nn.Module) -> None:
        """An error waits for `finish`: if tensors are missing or mis-shaped, the caller has that to say first."""
        del self._awaited[parameter]
        parts = self._parts[parameter]
        try:
            tensors = [self._tensors.pop(part.name) for part in parts]
            self._format(parts[0]).hold(_linear(module, parameter), parts, tensors)
        except TrtSpecError as error:
            self._error = self._error or error

    def _check_fused(self) -> None:
        """Linears that are one matrix here must be of one kind."""
        for name, slot in self.plain.items():
            if slot.parameter in self._parts:
                part = self._parts[slot.parameter][0]
                module = name.rpartition(".")[0]
                raise part.unsupported(f"is {part.scheme} and {module} is not, but they are one matrix here")
        for first, *others in self._parts.values():
            for part in others:
                if part.scheme.held != first.scheme.held:
                    raise first.unsupported(
                        f"is {first.scheme} and {part.name} {part.scheme}, but they are one matrix here"
                    )


def _linear(module: nn.Module, parameter: str) -> Linear:
    return cast(Linear, module.get_submodule(parameter.removesuffix(".weight")))


def _kv_scales(module: str) -> set[str]:
    """Where writers put the scale of the keys or values that a linear gives: at the linear or at its attention."""
    attention, _, name = module.rpartition(".")
    if name not in ("k_proj", "v_proj"):
        return set()
    return {f"{module}.{name[0]}_scale", f"{attention}.{name[0]}_scale"}
