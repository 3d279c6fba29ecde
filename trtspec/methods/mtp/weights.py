"""MTP modules of a target's own checkpoint: strict loading of what is theirs, and of that alone."""

from __future__ import annotations

import dataclasses

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.head import HeadResources
from trtspec.methods.mtp.checkpoint import require_mtp
from trtspec.methods.mtp.head import MtpHead, MtpSpec
from trtspec.models.decoder import Decoder
from trtspec.models.layers import unallocated
from trtspec.models.quantized import QuantizedLinears
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.weights import check_shapes, checkpoint_shapes, checkpoint_tensors, load_weights, missing_weights

_ROLE = "MTP"  # what errors call these weights


def load(resources: HeadResources, target: Decoder) -> MtpHead:
    """See methods.head.LoadHead. MTP runs a module per draft, other modes the first one for all of them."""
    speculation = resources.speculation
    count = speculation.num_speculative_tokens if speculation.mode.is_mtp_vanilla() else 1
    make = load_mtp if resources.reads_weights else describe_mtp
    return make(resources.target, target, count, resources.max_seq_len, resources.first_draft_layer)


def load_mtp(
    config: ModelConfig,
    target: Decoder,
    num_modules: int = 1,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> MtpHead:
    """The first `num_modules` modules in the target's folder `config.path`, in its dtype and eval mode. first_layer:
    index of their first KV layer, None = after the target's.

    WeightsError for tensors of any of its modules that are missing, mis-shaped or more than config.json has; only those
    wanted are read. For a target without modules see methods.mtp.checkpoint.require_mtp.
    """
    spec = _spec(config, target, num_modules)
    _check(config, spec)
    with unallocated(target.norm.weight.dtype):
        head = MtpHead(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    slots = head_slots(spec)
    wanted = tuple(_prefix(spec, i) for i in range(num_modules))
    packed = config.quantization is not None
    tensors = checkpoint_tensors(config.path, _ROLE, lambda name: name.startswith(wanted), packed)
    load_weights(head, slots, tensors, config.path, _ROLE, config.quantization)
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def describe_mtp(
    config: ModelConfig,
    target: Decoder,
    num_modules: int = 1,
    max_position: int | None = None,
    first_layer: int | None = None,
) -> MtpHead:
    """The head that `load_mtp` gives, without values, on torch's meta device. The folder needs its config.json alone;
    where there are weights, the files' headers are checked."""
    spec = _spec(config, target, num_modules)
    if not missing_weights(config.path, _ROLE):
        _check(config, spec)
    with torch.device("meta"), unallocated(target.norm.weight.dtype):
        head = MtpHead(spec, target.spec.num_layers if first_layer is None else first_layer, max_position)
    QuantizedLinears(head_slots(spec), config.quantization, f"{_ROLE} weights in {config.path}").describe(head)
    head.share(target.embedding, target.head)
    return head.eval().requires_grad_(False)


def head_slots(spec: MtpSpec) -> dict[str, Slot]:
    """Tensor name in the checkpoint -> slot, of all modules of `spec`."""
    family, H = spec.family, spec.layer.hidden_size
    slots: dict[str, Slot] = {}
    for i in range(spec.num_modules):
        theirs, ours = _prefix(spec, i), f"mtp.{i}."
        slots |= layer_slots(spec.layer, theirs, f"{ours}layer.", H)
        parts = [
            (family.token_norm, "token_norm", (H,)),
            (family.hidden_norm, "hidden_norm", (H,)),
            (family.projection, "projection", (H, 2 * H)),
            (family.norm, "norm", (H,)),
        ]
        if family.head is not None:
            parts.append((family.head, "head", (spec.layer.vocab_size, H)))
        slots |= {f"{theirs}{name}.weight": Slot(f"{ours}{part}.weight", 0, shape) for name, part, shape in parts}
    return slots


def _prefix(spec: MtpSpec, i: int) -> str:
    return f"{spec.family.prefix}{i}."


def _spec(config: ModelConfig, target: Decoder, num_modules: int) -> MtpSpec:
    """Modules attend as the target's last layer does."""
    family, _ = require_mtp(config.raw, config.path)
    return MtpSpec(
        dataclasses.replace(target.spec, num_layers=1, windows=target.spec.windows[-1:]), family, num_modules
    )


def _check(config: ModelConfig, spec: MtpSpec) -> None:
    """All modules, those that are not to be loaded too: WeightsError."""
    family, count = require_mtp(config.raw, config.path)
    slots = head_slots(dataclasses.replace(spec, num_modules=count))
    packed = config.quantization is not None
    shapes = checkpoint_shapes(config.path, _ROLE, lambda name: name.startswith(family.prefix), packed)
    check_shapes(slots, shapes, config.path, _ROLE, config.quantization)
