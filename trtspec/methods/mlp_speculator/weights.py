"""MLP speculator checkpoints: strict loading of the public layout.

Every name begins with `speculator.`, or none does: `emb.{i}.weight` [V, I], `proj.{i}.weight` [I, H] (i = 0) or [I, I],
`head.{i}.weight` [V, I], `ln.{i}.weight` and `ln.{i}.bias` [I], of the stages i = 0..n_predict-1. Where stages share
weights (tie_weights), what is shared may be there under any one of their numbers, or several: emb, head and ln are one
for all stages, proj for those from 1 on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.errors import WeightsError
from trtspec.methods.head import HeadResources, check_made_for
from trtspec.methods.mlp_speculator.checkpoint import MLPSpeculatorFacts
from trtspec.methods.mlp_speculator.head import MLPSpeculatorHead, MLPSpeculatorSpec
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.slots import Slot
from trtspec.models.weights import (
    check_shapes,
    checkpoint_shapes,
    checkpoint_tensors,
    load_weights,
    missing_weights,
    renamed,
)

_T = TypeVar("_T")


def head_slots(spec: MLPSpeculatorSpec) -> dict[str, Slot]:
    """Tensor name without its prefix -> slot, what is shared under the first stage's number that has it."""
    H, I, V = spec.hidden_size, spec.inner_size, spec.vocab_size  # noqa: E741
    slots = {}
    for i in range(spec.num_shared):
        slots[f"emb.{i}.weight"] = Slot(f"embeddings.{i}.weight", 0, (V, I))
        slots[f"head.{i}.weight"] = Slot(f"heads.{i}.weight", 0, (V, I))
        slots[f"ln.{i}.weight"] = Slot(f"norms.{i}.norm.weight", 0, (I,))
        slots[f"ln.{i}.bias"] = Slot(f"norms.{i}.bias", 0, (I,))
    for i in range(spec.num_projs):
        slots[f"proj.{i}.weight"] = Slot(f"projs.{i}.weight", 0, (I, I if i else H))
    return slots


def load(resources: HeadResources, target: Decoder) -> MLPSpeculatorHead:
    """See methods.head.LoadHead: the stages that K passes run."""
    assert resources.draft is not None
    make = load_mlp_speculator if resources.reads_weights else describe_mlp_speculator
    return make(resources.draft, target, resources.speculation.num_speculative_tokens)


def load_mlp_speculator(
    config: CheckpointConfig, target: Decoder, num_stages: int, role: str = "draft"
) -> MLPSpeculatorHead:
    """The first `num_stages` stages of the folder `config.path`, in the target's dtype and eval mode.

    Raises WeightsError naming each tensor, of any stage, that is missing, unexpected or of another shape than config
    and target call for, or that stages share and have in different values.
    """
    spec = _spec(config, target)
    found = dict(renamed(checkpoint_tensors(config.path, role), _public_name, config.path, role))
    tensors = _untied(found, spec, torch.equal, config, role)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(head_slots(spec), shapes.items(), config.path, role)
    with unallocated(target.norm.weight.dtype):
        head = MLPSpeculatorHead(dataclasses.replace(spec, num_stages=num_stages))
    slots = head_slots(head.spec)
    load_weights(head, slots, ((name, tensors.pop(name)) for name in slots), config.path, role)
    return head.eval().requires_grad_(False)


def describe_mlp_speculator(
    config: CheckpointConfig, target: Decoder, num_stages: int, role: str = "draft"
) -> MLPSpeculatorHead:
    """What `load_mlp_speculator` gives, without values, on torch's meta device. The folder needs its config.json alone;
    where there are weights, their headers are checked."""
    spec = _spec(config, target)
    if not missing_weights(config.path, role):
        found = dict(renamed(checkpoint_shapes(config.path, role), _public_name, config.path, role))
        shapes = _untied(found, spec, lambda a, b: a == b, config, role)
        check_shapes(head_slots(spec), shapes.items(), config.path, role)
    with torch.device("meta"), unallocated(target.norm.weight.dtype):
        head = MLPSpeculatorHead(dataclasses.replace(spec, num_stages=num_stages))
    return head.eval().requires_grad_(False)


def _spec(config: CheckpointConfig, target: Decoder) -> MLPSpeculatorSpec:
    """Of all stages."""
    facts, H, V = MLPSpeculatorFacts.of(config), target.spec.hidden_size, target.spec.vocab_size
    check_made_for(config.path, ("emb_dim", facts.hidden_size or H, H), ("vocab_size", facts.vocab_size or V, V))
    n = facts.n_predict
    return MLPSpeculatorSpec(H, facts.inner_size or H, V, n, n, facts.tie_weights, facts.scale_input)


def _public_name(name: str) -> str:
    return name.removeprefix("speculator.")


def _untied(
    found: Mapping[str, _T],
    spec: MLPSpeculatorSpec,
    equal: Callable[[_T, _T], bool],
    config: CheckpointConfig,
    role: str,
) -> dict[str, _T]:
    """What stages share once, under the name that `head_slots` has for it."""
    tensors: dict[str, _T] = {}
    for name, tensor in found.items():
        parts = re.fullmatch(r"(emb|head|ln|proj)\.(\d+)\.(weight|bias)", name) if spec.tied else None
        own = name
        if parts and int(parts[2]) < spec.n_predict:
            own = f"{parts[1]}.{min(int(parts[2]), int(parts[1] == 'proj'))}.{parts[3]}"
        if not equal(tensors.setdefault(own, tensor), tensor):
            raise WeightsError(
                f"{role} weights in {config.path}: tie_weights is true, but {name} differs from what other stages have "
                "in its place; correct config.json"
            )
    return tensors
