"""DFlash checkpoints: strict loading of z-lab's layout.

The layout: `fc.weight` [H, n * H], `hidden_norm.weight`, `norm.weight` [H], `layers.{i}.*` as in Qwen3; some exporters
put `model.` before everything. There is no embedding and no lm_head: the target's serve. Files that bring their own, a
vocabulary of fewer ids (d2t) or sinks (attention_sink_bias) are refused as having unexpected tensors.
"""

from __future__ import annotations

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.dflash.checkpoint import DFlashFacts
from trtspec.methods.dflash.head import DFlashHead, DFlashSpec
from trtspec.methods.head import HeadResources, check_made_for
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import ARCHITECTURES, dense_spec
from trtspec.models.weights import (
    check_shapes,
    checkpoint_shapes,
    checkpoint_tensors,
    load_weights,
    missing_weights,
    renamed,
)


def head_slots(spec: DFlashSpec) -> dict[str, Slot]:
    """Tensor name in the public layout -> slot."""
    H = spec.decoder.hidden_size
    slots = {"fc.weight": Slot("fc.weight", 0, (H, spec.num_captured * H))}
    slots |= {f"{name}.weight": Slot(f"{name}.weight", 0, (H,)) for name in ("hidden_norm", "norm")}
    for layer in range(spec.decoder.num_layers):
        slots |= layer_slots(spec.decoder, f"layers.{layer}.", f"layers.{layer}.", H)
    return slots


def load(resources: HeadResources, target: Decoder) -> DFlashHead:
    """See methods.head.LoadHead."""
    assert isinstance(resources.draft, ModelConfig)
    number, longest = len(resources.speculation.capture_layers), resources.max_seq_len
    make = load_dflash if resources.reads_weights else describe_dflash
    return make(resources.draft, target, number, longest, resources.first_draft_layer)


def load_dflash(
    config: ModelConfig,
    target: Decoder,
    num_captured: int,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> DFlashHead:
    """The folder `config.path` as the draft of `target`, in its dtype and eval mode. first_layer: index of its first KV
    layer, None = after the target's.

    Raises WeightsError naming each tensor that is missing, unexpected, or of another shape than the target calls for.
    """
    head = _empty(config, target, num_captured, max_position, first_layer)
    tensors = renamed(checkpoint_tensors(config.path, "draft"), _public, config.path, "draft")
    load_weights(head, head_slots(head.spec), tensors, config.path, "draft")
    return _ready(head, target)


def describe_dflash(
    config: ModelConfig,
    target: Decoder,
    num_captured: int,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> DFlashHead:
    """The head that `load_dflash` gives, without values, on torch's meta device. The folder needs its config.json
    alone; where there are weights, their headers are checked."""
    with torch.device("meta"):
        head = _empty(config, target, num_captured, max_position, first_layer)
    if not missing_weights(config.path, "draft"):
        shapes = renamed(checkpoint_shapes(config.path, "draft"), _public, config.path, "draft")
        check_shapes(head_slots(head.spec), shapes, config.path, "draft")
    return _ready(head, target)


def _empty(
    config: ModelConfig, target: Decoder, num_captured: int, max_position: int | None, first_layer: int | None
) -> DFlashHead:
    facts, depth = DFlashFacts.of(config), target.spec.num_layers
    check_made_for(
        config.path,
        ("hidden_size", config.hidden_size, target.spec.hidden_size),
        ("vocab_size", config.vocab_size, target.spec.vocab_size),
        ("num_target_layers", facts.num_target_layers or depth, depth),
    )
    spec = DFlashSpec(dense_spec(config, ARCHITECTURES["Qwen3ForCausalLM"]), num_captured)
    with unallocated(target.norm.weight.dtype):
        return DFlashHead(spec, depth if first_layer is None else first_layer, max_position)


def _ready(head: DFlashHead, target: Decoder) -> DFlashHead:
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def _public(name: str) -> str:
    return name.removeprefix("model.")
