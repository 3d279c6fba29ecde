"""MTP modules from a target's checkpoint, or from one of their own: strict loading of their tensors, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from trtspec.methods.head_weights import HeadSource, HeadWeights
from trtspec.methods.mtp.checkpoint import require_mtp
from trtspec.methods.mtp.head import MtpHead, MtpSpec
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import decoder_spec, mtp_prefix
from trtspec.models.weights import Wanted


class MtpWeights(HeadWeights[MtpSpec]):
    """The layout of MTP modules, which attend as the last layer of their checkpoint's decoder does.

    Tensors of all modules are checked, and those of the kept modules are read. Without modules, the errors are those of
    methods.mtp.checkpoint.require_mtp.
    """

    role = "MTP"

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        self.family, self.count = require_mtp(source.checkpoint.raw, source.checkpoint.path)
        self.described = decoder_spec(source.decoder)
        self.names = mtp_prefix(source.decoder.architecture, source.decoder.path)
        self.check_made_for(
            ("hidden_size", self.described.hidden_size, target.spec.hidden_size),
            ("vocab_size", self.described.vocab_size, target.spec.vocab_size),
        )

    def spec(self, found: Mapping[str, Tensor] | None) -> MtpSpec:
        layer = dataclasses.replace(self.described, num_layers=1, windows=self.described.windows[-1:])
        return MtpSpec(layer, self.family, self.count, self.names)

    def kept(self, whole: MtpSpec) -> MtpSpec:
        return dataclasses.replace(whole, num_modules=min(self.source.num_stages, whole.num_modules))

    @staticmethod
    def slots(spec: MtpSpec) -> dict[str, Slot]:
        family, H = spec.family, spec.layer.hidden_size
        slots: dict[str, Slot] = {}
        for i in range(spec.num_modules):
            theirs, ours = f"{spec.prefix}{i}.", f"mtp.{i}."
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

    def wanted(self, spec: MtpSpec | None = None) -> Wanted:
        """Return a filter by prefix, because tensors of quantised linears have other names than their slots."""
        prefixes = (self.names,) if spec is None else tuple(f"{self.names}{i}." for i in range(spec.num_modules))
        return lambda name: name.startswith(prefixes)

    def module(self, spec: MtpSpec) -> MtpHead:
        return MtpHead(spec, self.first_layer, self.source.max_seq_len)
