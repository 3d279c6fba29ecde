"""EAGLE3 checkpoints: strict loading of the public layout, and back into it.

The layout: `midlayer.*` (some exporters write `layers.0.*`, some put `model.` before everything), `fc.weight`
[H, n * Ht], `norm.weight`, `lm_head.weight` [Vd, H], `d2t` [Vd] (target id = draft id + d2t), `t2d` [V] bool, and an
`embed_tokens.weight` only where it differs from the target's. What a checkpoint leaves out, the target provides.
P-EAGLE has `layers.{1, 2, ...}.*` as in Llama besides, and `mask_hidden`, n * Ht elements in any shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import WeightsError
from trtspec.methods.eagle3.checkpoint import Eagle3Facts
from trtspec.methods.eagle3.head import Eagle3Head, Eagle3Spec
from trtspec.methods.head import HeadResources, check_made_for
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import dense_spec
from trtspec.models.weights import (
    check_shapes,
    checkpoint_shapes,
    checkpoint_tensors,
    load_weights,
    missing_weights,
    renamed,
    tensors_of,
)

_MASK = "mask_hidden"


def head_slots(spec: Eagle3Spec) -> dict[str, Slot]:
    """Tensor name in the public layout -> slot; d2t and t2d, which are no weights, apart."""
    layer, H = spec.layer, spec.layer.hidden_size
    slots = layer_slots(layer, "midlayer.", "midlayer.", 2 * H)
    slots["midlayer.hidden_norm.weight"] = Slot("midlayer.hidden_norm.weight", 0, (H,))
    slots["fc.weight"] = Slot("fc.weight", 0, (H, spec.num_captured * spec.target_hidden_size))
    slots["norm.weight"] = Slot("norm.weight", 0, (H,))
    for i in range(1, layer.num_layers):
        slots |= layer_slots(layer, f"layers.{i}.", f"layers.{i - 1}.", H)
    if spec.parallel:
        slots[_MASK] = Slot(_MASK, 0, (spec.num_captured * spec.target_hidden_size,))
    if spec.own_embedding:
        slots["embed_tokens.weight"] = Slot("embedding.weight", 0, (layer.vocab_size, H))
    if spec.own_head:
        slots["lm_head.weight"] = Slot("head.weight", 0, (spec.draft_vocab_size, H))
    return slots


def load(resources: HeadResources, target: Decoder) -> Eagle3Head:
    """See methods.head.LoadHead."""
    assert isinstance(resources.draft, ModelConfig)
    make = load_eagle3 if resources.reads_weights else describe_eagle3
    speculation, first = resources.speculation, resources.first_draft_layer
    parallel = speculation.mode.drafts_in_parallel()
    num_captured, longest = len(speculation.capture_layers), resources.max_seq_len
    return make(resources.draft, target, num_captured, longest, first_layer=first, parallel=parallel)


def load_eagle3(
    config: ModelConfig,
    target: Decoder,
    num_captured: int,
    max_position: int | None = None,
    role: str = "draft",
    first_layer: int | None = None,
    parallel: bool = False,
) -> Eagle3Head:
    """The folder `config.path` as the head of `target`, in its dtype and eval mode. first_layer: index of its first KV
    layer, None = after the target's. parallel: it is a P-EAGLE head.

    Raises WeightsError naming each tensor that is missing, unexpected, of another shape than the target calls for, or
    (d2t, t2d) of impossible values.
    """
    facts = Eagle3Facts.of(config, parallel)
    _fits(config, facts, target)
    tensors = dict(renamed(checkpoint_tensors(config.path, role), _public_name, config.path, role))
    if _MASK in tensors:
        tensors[_MASK] = tensors[_MASK].flatten()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = _spec(config, facts, target, num_captured, shapes, parallel)
    offsets, used = tensors.pop("d2t", None), tensors.pop("t2d", None)
    with unallocated(target.norm.weight.dtype):
        head = Eagle3Head(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    one_by_one = ((name, tensors.pop(name)) for name in [*tensors])  # keeping none that is loaded
    load_weights(head, head_slots(spec), one_by_one, config.path, role)
    head.set_vocabulary(_target_ids(config, facts, offsets, used))
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def describe_eagle3(
    config: ModelConfig,
    target: Decoder,
    num_captured: int,
    max_position: int | None = None,
    role: str = "draft",
    first_layer: int | None = None,
    parallel: bool = False,
) -> Eagle3Head:
    """The head that `load_eagle3` gives, without values, on torch's meta device.

    The folder needs its config.json alone: then the head counts as having an lm_head of its own, as public ones have,
    no norms of queries and keys, and an embedding only if it must. Where there are weights, their headers say, and are
    checked.
    """
    facts = Eagle3Facts.of(config, parallel)
    _fits(config, facts, target)
    there = not missing_weights(config.path, role)
    shapes = dict(renamed(checkpoint_shapes(config.path, role), _public_name, config.path, role)) if there else {}
    if _MASK in shapes:
        shapes[_MASK] = (prod(shapes[_MASK]),)
    spec = _spec(config, facts, target, num_captured, shapes, parallel)
    if there:
        offsets, used = shapes.pop("d2t", None), shapes.pop("t2d", None)
        check_shapes(head_slots(spec), shapes.items(), config.path, role)
        _check_vocabulary(config, facts, offsets, used)
    else:
        spec = dataclasses.replace(spec, own_head=True)
    with torch.device("meta"), unallocated(target.norm.weight.dtype):
        head = Eagle3Head(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def eagle3_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """The head in the public layout, contiguous copies."""
    tensors = tensors_of(head, head_slots(head.spec))
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    tensors["t2d"] = head.draft_ids >= 0
    return tensors


def _spec(
    config: ModelConfig,
    facts: Eagle3Facts,
    target: Decoder,
    num_captured: int,
    shapes: Mapping[str, tuple[int, ...]],
    parallel: bool,
) -> Eagle3Spec:
    """Of a checkpoint with these tensors."""
    _check_fused(config, shapes.get("fc.weight"), facts.target_hidden_size, num_captured)
    return Eagle3Spec(
        layer=dataclasses.replace(
            dense_spec(config), qk_norm=any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in shapes)
        ),
        target_hidden_size=facts.target_hidden_size,
        num_captured=num_captured,
        draft_vocab_size=facts.draft_vocab_size,
        norm_before_residual=facts.norm_before_residual,
        own_embedding="embed_tokens.weight" in shapes or config.hidden_size != target.spec.hidden_size,
        own_head="lm_head.weight" in shapes
        or config.hidden_size != target.spec.hidden_size
        or facts.draft_vocab_size != config.vocab_size,
        parallel=parallel,
    )


def _public_name(name: str) -> str:
    public = name.removeprefix("model.")
    return public.replace("layers.0.", "midlayer.", 1) if public.startswith("layers.0.") else public


def _check_fused(config: ModelConfig, fc: tuple[int, ...] | None, size: int, num_captured: int) -> None:
    """Apart from other shapes, as the remedy is another: it is the number of captured layers that is wrong."""
    if fc is None or len(fc) != 2 or fc[1] % size or fc[1] == num_captured * size:
        return
    wanted = fc[1] // size
    raise WeightsError(
        f"draft weights in {config.path}: fc.weight is {fc}, expected "
        f"({config.hidden_size}, {num_captured * size}): it fuses {wanted} hidden states of {size}, but "
        f"{num_captured} hidden states are captured; set capture_layers to the {wanted} layers it was trained on"
    )


def _fits(config: ModelConfig, facts: Eagle3Facts, target: Decoder) -> None:
    check_made_for(
        config.path,
        ("target_hidden_size (or hidden_size)", facts.target_hidden_size, target.spec.hidden_size),
        ("vocab_size", config.vocab_size, target.spec.vocab_size),
    )


def _check_vocabulary(
    config: ModelConfig, facts: Eagle3Facts, d2t: tuple[int, ...] | None, t2d: tuple[int, ...] | None
) -> None:
    """By their shapes alone."""
    where, size, vocab = f"draft weights in {config.path}: ", facts.draft_vocab_size, config.vocab_size
    if d2t is None and size != vocab:
        raise WeightsError(
            f"{where}d2t ({size},) is missing; a draft vocabulary of {size} ids for a target's {vocab} needs it"
        )
    if d2t is not None and d2t != (size,):
        raise WeightsError(f"{where}d2t is {d2t}, expected ({size},) of integers")
    if t2d is not None and t2d != (vocab,):
        raise WeightsError(f"{where}t2d is {t2d}, expected ({vocab},)")


def _target_ids(config: ModelConfig, facts: Eagle3Facts, offsets: Tensor | None, used: Tensor | None) -> Tensor:
    """[Vd] int64, checked."""
    where, size, vocab = f"draft weights in {config.path}: ", facts.draft_vocab_size, config.vocab_size
    _check_vocabulary(config, facts, *(None if t is None else tuple(t.shape) for t in (offsets, used)))
    if offsets is None:
        offsets = torch.zeros(size, dtype=torch.int64)
    if offsets.is_floating_point():
        raise WeightsError(f"{where}d2t is {tuple(offsets.shape)} {offsets.dtype}, expected ({size},) of integers")
    ids = torch.arange(size) + offsets.long()
    bad = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise WeightsError(
            f"{where}d2t[{i}] = {int(offsets[i])} makes draft id {i} the target's {int(ids[i])}; ids are "
            f"0..{vocab - 1}. Check that d2t holds offsets (target id - draft id) for this target"
        )
    firsts: dict[int, int] = {}
    for i, token in enumerate(ids.tolist()):
        if firsts.setdefault(token, i) != i:
            raise WeightsError(
                f"{where}d2t gives the draft ids {firsts[token]} and {i} the same target id {token}; it must be one to "
                "one. Check that d2t holds offsets (target id - draft id), not ids"
            )
    if used is not None and not torch.equal(used.bool().nonzero()[:, 0], ids.sort().values):
        raise WeightsError(f"{where}t2d and d2t name different tokens; they must come from the same training run")
    return ids
