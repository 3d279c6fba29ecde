"""Weights that are quantised already in the checkpoint: public layouts become ours, value by value, not rounded anew.

quantized_integers.py and quantized_fp8.py say what each kind of weights consists of. The code here gathers the tensors.
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
    """A model's linears that are quantised in its checkpoint. Each is packed as soon as its tensors have arrived.

    plain: the slots that are not quantised.
    required, optional: shapes of the quantised linears' tensors, by name.
    where: text that error messages begin with.
    Raises UnsupportedError for a linear whose weights our layouts cannot hold as they are.
    """

    def __init__(self, slots: Mapping[str, Slot], quantization: CheckpointQuantization | None, where: str) -> None:
        self.where = where
        self.plain: dict[str, Slot] = {}
        self.required: dict[str, tuple[int, ...]] = {}
        self.optional: dict[str, tuple[int, ...]] = {}
        self._formats: dict[type[Any], Format[Any]] = {IntegerScheme: Integers(), Fp8Scheme: Fp8()}
        self._parts: dict[str, list[Part[Any]]] = {}  # by our parameter's name
        self._modules: dict[str, Part[Any]] = {}  # by the linear's name in the checkpoint
        self._awaited: dict[str, set[str]] = {}  # our parameter, not packed yet -> tensors that may still arrive
        self._tensors: dict[str, dict[str, Tensor]] = {}  # linear of the checkpoint, not packed yet -> tensors so far
        self._kv_scales: set[str] = set()  # names that KV scales may have
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
        """Whether the tensor is spare: a bias of zeros, or a scale of keys or values.

        Early GPTQ writers gave every linear a bias, of zeros where the model has none. The scales are for caches of
        another dtype.
        """
        if name in self._kv_scales:
            self._has_kv_scales = True
            return True
        return self.is_spare(name) and not tensor.any()

    def is_spare(self, name: str) -> bool:
        """Whether a tensor of this name may be spare."""
        module, _, kind = name.rpartition(".")
        return name in self._kv_scales or (kind == "bias" and module in self._modules)

    def take(self, name: str, tensor: Tensor, into: nn.Module) -> None:
        """Take one of the tensors, in its right shape, and pack its linear of the module `into` if none is missing.

        WeightsError if the tensor's dtype does not fit.
        """
        module, _, kind = name.rpartition(".")
        part = self._modules[module]
        if wanted := self._format(part).misfit(part, kind, tensor):
            raise WeightsError(f"{self.where}: {name} is {tensor.dtype}, expected {wanted}; download the file again")
        parameter = part.slot.parameter
        awaited = self._awaited.get(parameter)
        if awaited is None:
            return  # another shard holds it too, and the linear is packed
        self._tensors.setdefault(module, {})[kind] = tensor
        awaited.discard(name)
        if not awaited:
            self._pack(parameter, into)

    def finish(self, module: nn.Module) -> None:
        """Pack the linears that lack only an optional tensor, which will not arrive.

        UnsupportedError or CheckpointError for values that no layout can hold, in any linear.
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
        """Give the quantised linears of `module` the tensors that they will hold, on torch's meta device."""
        for parameter, parts in self._parts.items():
            self._format(parts[0]).describe(_linear(module, parameter), parts)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of all weights once they are loaded; `itemsize` is the bytes of a floating-point number."""
        total = sum(torch.Size(slot.shape).numel() for slot in self.plain.values()) * itemsize
        return total + sum(self._format(parts[0]).num_bytes(parts) for parts in self._parts.values())

    def _format(self, part: Part[Any]) -> Format[Any]:
        return self._formats[type(part.scheme)]

    def _pack(self, parameter: str, module: nn.Module) -> None:
        """Pack a linear.

        An error waits for `finish`: missing or mis-shaped tensors are the errors that the caller reports first.
        """
        del self._awaited[parameter]
        parts = self._parts[parameter]
        try:
            tensors = [self._tensors.pop(part.name) for part in parts]
            self._format(parts[0]).hold(_linear(module, parameter), parts, tensors)
        except TrtSpecError as error:
            self._error = self._error or error

    def _check_fused(self) -> None:
        """Check that linears which are one matrix here are of one kind. UnsupportedError if they are not."""
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
    """Names that writers use for the scale of the keys or values of a linear: at the linear, or at its attention."""
    attention, _, name = module.rpartition(".")
    if name not in ("k_proj", "v_proj"):
        return set()
    return {f"{module}.{name[0]}_scale", f"{attention}.{name[0]}_scale"}
