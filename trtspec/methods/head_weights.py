"""Loads draft heads from checkpoint folders.

Each method's folder describes what is special about its kind of head, and `build_head` does the rest. The headers of
the weight files are read first, as tensors on torch's meta device. Their names and shapes determine the parts of the
head, and are checked. Then the values are read, one tensor at a time.
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
"""Pairs of name and tensor; a tensor on torch's meta device stands for a header in a file."""


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The sources and settings from which a head is built.

    checkpoint: contains the head's weights; it is the draft's folder or the target's. owner: the target's checkpoint.
    num_stages: number of heads, stages or modules that K drafts can use; 1 for a head that runs next to the target.
    num_captured: number of the target's states that the head reads. parallel: all drafts come from one pass.
    max_seq_len: bound of the rotary tables in tokens, None = as config.json says. first_layer: index of the head's
    first KV layer, None = after the target's layers. reads_weights: False = shapes alone, on torch's meta device.
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
        """The checkpoint as a ModelConfig, for a head that is made of decoder layers."""
        assert isinstance(self.checkpoint, ModelConfig)
        return self.checkpoint


class HeadWeights(ABC, Generic[Spec]):
    """A checkpoint layout for one kind of head; an instance makes one head for `target`.

    `Spec` is the type that describes such a head. role: name of the weights in error messages. prefix: optional
    beginning of tensor names; None = names are taken as they are. tables: public names of the tensors that `target_ids`
    reads.
    """

    role: ClassVar[str] = "draft"
    prefix: ClassVar[str | None] = None
    tables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        """Store the source and the target; a subclass also reads config.json here, once."""
        self.source = source
        self.target = target
        self.where = f"{self.role} weights in {source.checkpoint.path}"
        self.first_layer = target.spec.num_layers if source.first_layer is None else source.first_layer

    @abstractmethod
    def spec(self, found: Mapping[str, Tensor] | None) -> Spec:
        """Return the spec of the whole checkpoint.

        found: the headers by public name, None = there are no weights to inspect.
        """

    def kept(self, whole: Spec) -> Spec:
        """Return the part of a checkpoint's spec that is held in memory; parts that never run are left out."""
        return whole

    @staticmethod
    @abstractmethod
    def slots(spec: Spec) -> dict[str, Slot]:
        """Return public tensor name -> slot of the module, for all weights of `spec`."""

    @abstractmethod
    def module(self, spec: Spec) -> DraftHead:
        """Return the head, its weights not loaded."""

    def wanted(self, spec: Spec | None = None) -> Wanted:
        """Return a filter on tensor names in the files: the head's tensors, or with a spec those read for it."""
        if spec is None:
            return lambda name: True
        slots = self.slots(spec)
        # modules of linears: a quantised one has other tensors instead of a weight
        modules = {module_of(name) for name in slots} - {""} if self.source.checkpoint.quantization is not None else ()
        return lambda name: self.public(name) in slots or module_of(self.public(name)) in modules

    def public(self, name: str) -> str:
        """Return the public name of a tensor that a file calls `name`."""
        return name.removeprefix(self.prefix or "")

    def tensors(self, found: Named) -> Named:
        """Return tensors of the files under their public names. WeightsError if two get the same name."""
        return found if self.prefix is None else renamed(found, self.public, self.source.checkpoint.path, self.role)

    def held(self, spec: Spec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return a tensor in the shape of its slot; None = it is no weight of the head. ids: result of `target_ids`."""
        return tensor

    def target_ids(self, spec: Spec, tables: Mapping[str, Tensor]) -> Tensor | None:
        """Return the target's id of each draft id, [Vd] int64; None = the same id, or not known yet.

        tables: the tables that the checkpoint has; without `reads_weights` they are on torch's meta device.
        WeightsError for impossible tables.
        """
        return None

    def check_made_for(self, *sizes: tuple[str, int, int]) -> None:
        """Raise WeightsError unless each size of the head equals the target's.

        sizes: (field of config.json, its value, the target's value) of each size that must be equal.
        """
        for name, ours, theirs in sizes:
            if ours != theirs:
                raise WeightsError(
                    f"draft model {self.source.checkpoint.path} was made for another target: its {name} is {ours}, the "
                    f"target's is {theirs}; use the head trained for this target"
                )


def module_of(name: str) -> str:
    """Return the name of the module that a tensor belongs to: "fc" for "fc.weight", "" for "d2t"."""
    return name.rpartition(".")[0]


def build_head(kind: type[HeadWeights[Any]], source: HeadSource, target: Decoder) -> DraftHead:
    """Build the head for `target`, in the target's dtype and eval mode, without gradients.

    With `reads_weights` False the folder needs only its config.json; if there are weights, their headers are checked.
    Raises WeightsError that names each tensor that is missing, unexpected, of impossible values, or of another shape
    than config and target require. Raises CheckpointError and UnsupportedError too.
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
    """Return the headers by public name; None if weights are optional and there are none."""
    checkpoint, role = weights.source.checkpoint, weights.role
    if not weights.source.reads_weights and missing_weights(checkpoint.path, role):
        return None
    shapes = checkpoint_shapes(checkpoint.path, role, weights.wanted(), checkpoint.quantization is not None)
    return dict(weights.tensors((name, torch.empty(shape, device="meta")) for name, shape in shapes))


def _quantization(weights: HeadWeights[Any], is_there: bool) -> CheckpointQuantization | None:
    """Return the checkpoint's quantisation, with its linears under their public names.

    The checkpoint itself names linears as its files do. is_there: whether the folder has weights.
    """
    checkpoint = weights.source.checkpoint
    if checkpoint.quantization is None or not is_there:
        return checkpoint.quantization
    names = [name for name, _ in checkpoint_shapes(checkpoint.path, weights.role, weights.wanted(), packed=True)]
    return checkpoint.quantization.renamed({module_of(weights.public(name)): module_of(name) for name in names})


def _tables(weights: HeadWeights[Any], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tables that the checkpoint has, with values if `reads_weights`."""
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
