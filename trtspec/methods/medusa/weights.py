"""Medusa checkpoints: strict loading of the two public layouts.

vLLM's: `blocks.{head}.layers.{layer}.weight` [H, H] and `.bias` [H], `lm_heads.{head}.weight` [Vd, H], and where the
heads know fewer ids than the target, `token_map` [Vd], the target's id of each (the lm_heads may still have a row for
each of the target's). With `original_lm_head`, one lm_head for
all heads, as `lm_head.weight` or `lm_heads.0.weight`; the target's, if there is neither.

FasterDecoding's: `{head}.{layer}.linear.weight` and `.bias`, `{head}.{layers}.weight` for the lm_head. Names of both
may begin with `medusa_heads.` or `medusa_head.`
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.errors import WeightsError
from trtspec.methods.head import HeadResources, check_made_for
from trtspec.methods.medusa.checkpoint import MedusaFacts
from trtspec.methods.medusa.head import MedusaHead, MedusaSpec
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

_Shape = tuple[int, ...]


def head_slots(spec: MedusaSpec) -> dict[str, Slot]:
    """Tensor name in vLLM's layout -> slot; token_map, which is no weight, apart."""
    H, slots = spec.hidden_size, {}
    for head in range(spec.num_heads):
        for layer in range(spec.num_layers):
            theirs, ours = f"blocks.{head}.layers.{layer}", f"blocks.{head}.{layer}"
            slots[f"{theirs}.weight"] = Slot(f"{ours}.weight", 0, (H, H))
            if spec.bias:
                slots[f"{theirs}.bias"] = Slot(f"{ours}.bias", 0, (H,))
    for head in range(spec.num_lm_heads):
        slots[f"lm_heads.{head}.weight"] = Slot(f"heads.{head}.weight", 0, (spec.draft_vocab_size, H))
    return slots


def load(resources: HeadResources, target: Decoder) -> MedusaHead:
    """See methods.head.LoadHead: the heads that K passes run."""
    assert resources.draft is not None
    make = load_medusa if resources.reads_weights else describe_medusa
    return make(resources.draft, target, resources.speculation.num_speculative_tokens)


def load_medusa(config: CheckpointConfig, target: Decoder, num_heads: int, role: str = "draft") -> MedusaHead:
    """The first `num_heads` heads of the folder `config.path`, in the target's dtype and eval mode.

    Raises WeightsError naming each tensor, of any head, that is missing, unexpected or of another shape than config and
    target call for, or (token_map) of impossible values.
    """
    facts = MedusaFacts.of(config)
    tensors = dict(renamed(checkpoint_tensors(config.path, role), _public_name(facts), config.path, role))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = _checked_spec(config, facts, target, shapes, role)
    target_ids = _target_ids(config, spec, tensors.pop("token_map", None))
    with unallocated(target.norm.weight.dtype):
        head = MedusaHead(_first(spec, num_heads))
    slots = head_slots(head.spec)
    known = ((name, _known_rows(name, tensors.pop(name), spec, target_ids)) for name in slots)
    load_weights(head, slots, known, config.path, role)
    head.set_vocabulary(target_ids)
    head.share(target.head)
    return head.eval().requires_grad_(False)


def describe_medusa(config: CheckpointConfig, target: Decoder, num_heads: int, role: str = "draft") -> MedusaHead:
    """What `load_medusa` gives, without values, on torch's meta device.

    The folder needs its config.json alone: then there is an lm_head for each head, or one where the config says so, and
    biases only if it says so. Where there are weights, their headers say, and are checked.
    """
    facts = MedusaFacts.of(config)
    if missing_weights(config.path, role):
        spec = _spec(config, facts, target, bool(facts.fc_bias), own_head=True)
    else:
        shapes = dict(renamed(checkpoint_shapes(config.path, role), _public_name(facts), config.path, role))
        spec = _checked_spec(config, facts, target, shapes, role)
    with torch.device("meta"), unallocated(target.norm.weight.dtype):
        head = MedusaHead(_first(spec, num_heads))
    head.share(target.head)
    return head.eval().requires_grad_(False)


def _first(spec: MedusaSpec, num_heads: int) -> MedusaSpec:
    """Of these heads alone: those that are never run take no memory."""
    return dataclasses.replace(spec, num_heads=num_heads, num_lm_heads=min(spec.num_lm_heads, num_heads))


def _spec(config: CheckpointConfig, facts: MedusaFacts, target: Decoder, bias: bool, own_head: bool) -> MedusaSpec:
    H, V = target.spec.hidden_size, target.spec.vocab_size
    check_made_for(config.path, ("hidden_size", facts.hidden_size or H, H), ("vocab_size", facts.vocab_size or V, V))
    size = facts.draft_vocab_size or V
    if size > V:
        raise WeightsError(
            f"draft model {config.path}: truncated_vocab_size is {size}, more than the target's {V} ids; use the heads "
            "trained for this target"
        )
    num_lm_heads = facts.num_heads if not facts.shared_head else int(own_head)
    return MedusaSpec(H, V, size, facts.num_heads, facts.num_layers, num_lm_heads, bias, facts.logit_scale)


def _checked_spec(
    config: CheckpointConfig, facts: MedusaFacts, target: Decoder, shapes: Mapping[str, _Shape], role: str
) -> MedusaSpec:
    """Of a checkpoint with these tensors, which are right."""
    bias = any(name.endswith(".bias") for name in shapes) if facts.fc_bias is None else facts.fc_bias
    own_head = "lm_heads.0.weight" in shapes or facts.draft_vocab_size not in (None, target.spec.vocab_size)
    spec = _spec(config, facts, target, bias, own_head)
    size = spec.draft_vocab_size
    there = {name: (size, *shape[1:]) if _is_whole(name, shape, spec) else shape for name, shape in shapes.items()}
    if size != spec.vocab_size and there.pop("token_map", None) != (size,):
        raise WeightsError(
            f"{role} weights in {config.path}: token_map is {shapes.get('token_map', 'missing')}, expected "
            f"({size},): a draft vocabulary of {size} ids for a target's {spec.vocab_size} needs it"
        )
    check_shapes(head_slots(spec), there.items(), config.path, role)
    return spec


def _is_whole(name: str, shape: _Shape, spec: MedusaSpec) -> bool:
    """Whether an lm_head has rows for ids that the draft vocabulary leaves out."""
    return name.startswith("lm_heads.") and shape[:1] == (spec.vocab_size,) != (spec.draft_vocab_size,)


def _known_rows(name: str, tensor: Tensor, spec: MedusaSpec, target_ids: Tensor) -> Tensor:
    return tensor[target_ids] if _is_whole(name, tuple(tensor.shape), spec) else tensor


def _public_name(facts: MedusaFacts) -> Callable[[str], str]:
    """From any of the layouts to vLLM's."""

    def public(name: str) -> str:
        name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        if facts.shared_head and name == "lm_head.weight":
            return "lm_heads.0.weight"
        if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
        if found := re.fullmatch(rf"(\d+)\.{facts.num_layers}\.weight", name):
            return f"lm_heads.{found[1]}.weight"
        return name

    return public


def _target_ids(config: CheckpointConfig, spec: MedusaSpec, token_map: Tensor | None) -> Tensor:
    """[Vd] int64, checked."""
    if token_map is None:
        return torch.arange(spec.vocab_size)
    ids = token_map.long()
    known = ids.tolist()
    if token_map.is_floating_point() or min(known) < 0 or max(known) >= spec.vocab_size or len({*known}) < len(known):
        raise WeightsError(
            f"draft weights in {config.path}: token_map must hold different ids of the target, integers in "
            f"0..{spec.vocab_size - 1}; it must come from the same training run as the heads"
        )
    return ids
