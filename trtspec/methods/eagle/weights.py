"""EAGLE checkpoints: strict loading of the public layout.

The layout: `fc.weight` [H, 2H], whose columns read [embedding ; hidden state], `fc.bias` [H] or none, `layers.{i}.*` as
in Llama, `layers.0` without input_layernorm; some exporters put `model.` before everything. `embed_tokens.weight` and
`lm_head.weight` [V, H] may be there, as published files have the target's embedding. Where they equal the target's, or
are missing, the target's serve and are held once; others are used (vLLM takes the target's whatever the file has).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import UnsupportedError
from trtspec.methods.eagle.head import EagleHead, EagleSpec
from trtspec.methods.eagle3.checkpoint import EagleFacts
from trtspec.methods.head import HeadResources, check_made_for
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import ARCHITECTURES, DecoderSpec, dense_spec
from trtspec.models.weights import (
    check_shapes,
    checkpoint_shapes,
    checkpoint_tensors,
    load_weights,
    missing_weights,
    renamed,
    same_tensor,
)

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def head_slots(spec: EagleSpec) -> dict[str, Slot]:
    """Tensor name in the public layout -> slot."""
    H, V = spec.decoder.hidden_size, spec.decoder.vocab_size
    slots = {"fc.weight": Slot("fc.weight", 0, (H, 2 * H))}
    if spec.fc_bias:
        slots["fc.bias"] = Slot("fc.bias", 0, (H,))
    for layer in range(spec.decoder.num_layers):
        slots |= layer_slots(spec.decoder, f"layers.{layer}.", f"layers.{layer}.", H)
    del slots["layers.0.input_layernorm.weight"]
    if spec.own_embedding:
        slots[_EMBEDDING] = Slot("embedding.weight", 0, (V, H))
    if spec.own_head:
        slots[_HEAD] = Slot("head.weight", 0, (V, H))
    return slots


def load(resources: HeadResources, target: Decoder) -> EagleHead:
    """See methods.head.LoadHead."""
    assert isinstance(resources.draft, ModelConfig)
    make = load_eagle if resources.reads_weights else describe_eagle
    return make(resources.draft, resources.target, target, resources.max_seq_len, resources.first_draft_layer)


def load_eagle(
    config: ModelConfig,
    owner: ModelConfig,
    target: Decoder,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> EagleHead:
    """The folder `config.path` as the head of `target`, which is the checkpoint `owner`, in its dtype and eval mode.
    first_layer: index of its first KV layer, None = after the target's.

    Raises WeightsError naming each tensor that is missing, unexpected, or of another shape than the target calls for.
    """
    shapes = dict(renamed(checkpoint_shapes(config.path, "draft"), _public, config.path, "draft"))
    spec = _spec(config, owner, target, shapes)
    with unallocated(target.norm.weight.dtype):
        head = EagleHead(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    slots, tensors = head_slots(spec), renamed(checkpoint_tensors(config.path, "draft"), _public, config.path, "draft")
    own = ((name, tensor) for name, tensor in tensors if not _is_shared(name, slots))
    load_weights(head, slots, own, config.path, "draft")
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def describe_eagle(
    config: ModelConfig,
    owner: ModelConfig,
    target: Decoder,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> EagleHead:
    """The head that `load_eagle` gives, without values, on torch's meta device.

    The folder needs its config.json alone: then the head counts as having a bias of fc unless that says no, other
    biases as it says, no norms of queries and keys, and the target's embedding and lm_head. Where there are weights,
    their headers say, and are checked.
    """
    there = not missing_weights(config.path, "draft")
    shapes = dict(renamed(checkpoint_shapes(config.path, "draft"), _public, config.path, "draft")) if there else {}
    spec = _spec(config, owner, target, shapes)
    if there:
        slots = head_slots(spec)
        own = ((name, shape) for name, shape in shapes.items() if not _is_shared(name, slots))
        check_shapes(slots, own, config.path, "draft")
    with torch.device("meta"), unallocated(target.norm.weight.dtype):
        head = EagleHead(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def _spec(config: ModelConfig, owner: ModelConfig, target: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> EagleSpec:
    """Of a checkpoint with these tensors; of none: as config.json says."""
    facts = EagleFacts.of(config)
    check_made_for(
        config.path,
        ("hidden_size", config.hidden_size, target.spec.hidden_size),
        ("vocab_size", config.vocab_size, target.spec.vocab_size),
    )
    fc_bias = facts.fc_bias is True or "fc.bias" in shapes
    return EagleSpec(
        decoder=_decoder(config, shapes),
        fc_bias=fc_bias if shapes else facts.fc_bias is not False,
        own_embedding=_is_own(config, owner, target, shapes, _EMBEDDING),
        own_head=_is_own(config, owner, target, shapes, _HEAD),
    )


def _decoder(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
    """Its layers. Which biases and norms a head has does not follow from the name of its architecture."""
    if config.architecture.removeprefix("Eagle") not in ARCHITECTURES:
        raise UnsupportedError(
            f"draft model {config.path}: architecture {config.architecture!r} is no EAGLE head we run; supported: "
            f"{', '.join(ARCHITECTURES)}, each also with Eagle before its name"
        )

    def has(*names: str) -> bool:
        return any(name.endswith(names) for name in shapes)

    said = dense_spec(config)
    return dataclasses.replace(
        said,
        qkv_bias=said.qkv_bias or has("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        o_bias=said.o_bias or has("o_proj.bias"),
        mlp_bias=said.mlp_bias or has("gate_proj.bias", "up_proj.bias", "down_proj.bias"),
        qk_norm=has("q_norm.weight", "k_norm.weight"),
    )


def _is_own(
    config: ModelConfig, owner: ModelConfig, target: Decoder, shapes: Mapping[str, tuple[int, ...]], name: str
) -> bool:
    """Whether the checkpoint has an embedding or lm_head that is not the target's."""
    if name not in shapes or missing_weights(owner.path, "target"):
        return False
    theirs = name if name == _HEAD and not target.spec.tie_word_embeddings else f"model.{_EMBEDDING}"
    dtype = target.norm.weight.dtype
    return not any(
        same_tensor((config.path, own, "draft"), (owner.path, theirs, "target"), dtype)
        for own in (name, f"model.{name}")
    )


def _is_shared(name: str, slots: Mapping[str, Slot]) -> bool:
    """Whether a tensor is there, and the target's is used."""
    return name in (_EMBEDDING, _HEAD) and name not in slots


def _public(name: str) -> str:
    return name.removeprefix("model.")
