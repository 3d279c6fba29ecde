"""From a checkpoint folder to a draft head: a room says what is special about its kind, `build_head` does the rest.

Headers of the weight files come first, as tensors on torch's meta device: their names and shapes say what the head has,
and are checked. Then values are read, one tensor at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.errors import WeightsError
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.quantized import QuantizedLinears
from trtspec.models.slots import Slot
from trtspec.models.weights import (
    Wanted,
    check_shapes,
    checkpoint_shapes,
    checkpoint_tensors,
    load_weights,
    missing_weights,
    renamed,
)

Spec = TypeVar("Spec")
Named = Iterable[tuple[str, Tensor]]
"""Tensors by name; those on torch's meta device stand for the headers of a file."""


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """What a head is made of. `checkpoint` holds its weights: the draft's folder, or the target's. `owner` is
    the target's checkpoint.

    num_stages: heads, stages or modules that K drafts have use for; 1 beside the target. num_captured: states of the
    target that it reads. parallel: all drafts come from one pass. max_seq_len: bound of rotary tables in tokens, None =
    as config.json says. first_layer: index of its first KV layer, None = after the target's. reads_weights: False =
    shapes alone, on torch's meta device.
    """

    checkpoint: CheckpointConfig
    owner: ModelConfig
    num_stages: int = 1
    num_captured: int = 1
    parallel: bool = False
    max_seq_len: int | None = None
    first_layer: int | None = None
    reads_weights: bool = True

    @property
    def decoder(self) -> ModelConfig:
        """The checkpoint of a head that is made of decoder layers."""
        assert isinstance(self.checkpoint, ModelConfig)
        return self.checkpoint


class HeadWeights(ABC, Generic[Spec]):
    """How a kind of head lies in a checkpoint; an instance makes one head of `target`. `Spec` describes such a head.

    role: what errors call the weights. prefix: what tensor names may begin with; None = they are taken as they are.
    tables: public names of the tensors that `target_ids` reads.
    """

    role: ClassVar[str] = "draft"
    prefix: ClassVar[str | None] = None
    tables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        """A room reads here what config.json says, once."""
        self.source = source
        self.target = target
        self.where = f"{self.role} weights in {source.checkpoint.path}"
        self.first_layer = target.spec.num_layers if source.first_layer is None else source.first_layer

    @abstractmethod
    def spec(self, found: Mapping[str, Tensor] | None) -> Spec:
        """Of a checkpoint with these headers by public name, all of it; None = there are no weights to look at."""

    def kept(self, whole: Spec) -> Spec:
        """The part of a checkpoint's spec that is held: what is never run takes no memory."""
        return whole

    @staticmethod
    @abstractmethod
    def slots(spec: Spec) -> dict[str, Slot]:
        """Public tensor name -> slot of the module, for all weights of `spec`."""

    @abstractmethod
    def module(self, spec: Spec) -> DraftHead:
        """The head, its weights not loaded."""

    def wanted(self, spec: Spec | None = None) -> Wanted:
        """Which tensors of the files are the head's, by the names there; with a spec, which are read for it."""
        if spec is None:
            return lambda name: True
        slots = self.slots(spec)
        # what a linear has in the place of its weight
        modules = {module_of(name) for name in slots} - {""} if self.source.checkpoint.quantization is not None else ()
        return lambda name: self.public(name) in slots or module_of(self.public(name)) in modules

    def public(self, name: str) -> str:
        """The public name of a tensor that a file calls `name`."""
        return name.removeprefix(self.prefix or "")

    def tensors(self, found: Named) -> Named:
        """Tensors of the files by their public names. WeightsError where two come to the same."""
        return found if self.prefix is None else renamed(found, self.public, self.source.checkpoint.path, self.role)

    def held(self, spec: Spec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """A tensor in the shape of its slot; None = it is no weight of the head. ids: what `target_ids` gave."""
        return tensor

    def target_ids(self, spec: Spec, tables: Mapping[str, Tensor]) -> Tensor | None:
        """[Vd] int64, what each draft id stands for; None = itself, or not known yet. tables: those that are there, on
        torch's meta device without `reads_weights`. WeightsError for what cannot be."""
        return None

    def check_made_for(self, *sizes: tuple[str, int, int]) -> None:
        """(field of config.json, its value, the target's), of each that must be equal. Raises WeightsError."""
        for name, ours, theirs in sizes:
            if ours != theirs:
                raise WeightsError(
                    f"draft model {self.source.checkpoint.path} was made for another target: its {name} is {ours}, the "
                    f"target's is {theirs}; use the head trained for this target"
                )


def module_of(name: str) -> str:
    """What a tensor of this name belongs to: "fc" of "fc.weight", "" of "d2t"."""
    return name.rpartition(".")[0]


def build_head(kind: type[HeadWeights[Any]], source: HeadSource, target: Decoder) -> DraftHead:
    """The head of `target`, in its dtype and eval mode, without gradients.

    Where only shapes are asked for, the folder needs its config.json alone; weights that are there are checked by their
    headers. Raises WeightsError naming each tensor that is missing, unexpected, of another shape than config and target
    call for, or of impossible values; CheckpointError; UnsupportedError.
    """
    weights = kind(source, target)
    folder, role, found = source.checkpoint.path, weights.role, _headers(weights)
    quantization = _quantization(weights, found is not None)
    whole = weights.spec(found)
    ids = None
    if found is not None:
        shapes = ((name, tuple(tensor.shape)) for name, tensor in _held(weights, whole, found.items()))
        check_shapes(weights.slots(whole), shapes, folder, role, quantization)
        ids = weights.target_ids(whole, _tables(weights, found))
    spec = weights.kept(whole)
    slots = weights.slots(spec)
    with torch.device("cpu" if source.reads_weights else "meta"), unallocated(target.norm.weight.dtype):
        head = weights.module(spec)
    if source.reads_weights:
        tensors = _held(weights, spec, _read(weights, weights.wanted(spec)), ids)
        load_weights(head, slots, tensors, folder, role, quantization)
        if ids is not None:
            head.set_vocabulary(ids)
    else:
        QuantizedLinears(slots, quantization, weights.where).describe(head)
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def _headers(weights: HeadWeights[Any]) -> dict[str, Tensor] | None:
    """By public name; None where there may be no weights, and are none."""
    checkpoint, role = weights.source.checkpoint, weights.role
    if not weights.source.reads_weights and missing_weights(checkpoint.path, role):
        return None
    shapes = checkpoint_shapes(checkpoint.path, role, weights.wanted(), checkpoint.quantization is not None)
    return dict(weights.tensors((name, torch.empty(shape, device="meta")) for name, shape in shapes))


def _quantization(weights: HeadWeights[Any], is_there: bool) -> CheckpointQuantization | None:
    """What the checkpoint says of quantised weights, whose linears it calls as its files do, of their public names."""
    checkpoint = weights.source.checkpoint
    if checkpoint.quantization is None or not is_there:
        return checkpoint.quantization
    names = [name for name, _ in checkpoint_shapes(checkpoint.path, weights.role, weights.wanted(), packed=True)]
    return checkpoint.quantization.renamed({module_of(weights.public(name)): module_of(name) for name in names})


def _tables(weights: HeadWeights[Any], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With values, where they are to be read."""
    there = {name: found[name] for name in weights.tables if name in found}
    return dict(_read(weights, lambda name: weights.public(name) in there)) if weights.source.reads_weights else there


def _read(weights: HeadWeights[Any], wanted: Wanted) -> Named:
    checkpoint = weights.source.checkpoint
    return weights.tensors(
        checkpoint_tensors(checkpoint.path, weights.role, wanted, checkpoint.quantization is not None)
    )


def _held(
    weights: HeadWeights[Any], spec: Any, found: Named, ids: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in found:
        held = weights.held(spec, name, tensor, ids)
        if held is not None:
            yield name, held
