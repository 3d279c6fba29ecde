"""A whole smaller decoder as a draft head: it reads tokens alone, and nothing of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from trtspec.methods.head import DraftHead
from trtspec.methods.head_weights import HeadSource, HeadWeights
from trtspec.models.attention import Attend
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, weight_slots
from trtspec.models.specs import DecoderSpec, decoder_spec
from trtspec.models.weights import Wanted, of_decoder


class DecoderHead(DraftHead):
    """`decoder`, of the target's vocabulary. first_layer: the index under which its first layer asks for KV.

    Unlike other heads it is given the token *of* each row, and h is not read; y are its states after its last norm.
    """

    def __init__(self, decoder: Decoder, first_layer: int) -> None:
        super().__init__(decoder.spec.vocab_size, kv_layers=decoder.spec.kv_layers)
        self.decoder = decoder
        self.first_layer = first_layer

    def forward(self, input_ids: Tensor, h: Tensor, positions: Tensor, attend: Attend, step: int = 0) -> Tensor:
        """See the class."""

        def attend_behind(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.first_layer + layer, q, k, v)

        return self.decoder(input_ids, positions, attend_behind)  # type: ignore[no-any-return]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """See DraftHead."""
        return self.decoder.logits(y)

    def weight_bytes_for(self, num_passes: int) -> int:
        """See DraftHead."""
        return num_passes * self.decoder.weight_bytes_per_step


class DecoderWeights(HeadWeights[DecoderSpec]):
    """A decoder's checkpoint. The draft computes in the target's dtype, whatever its own: they share a launch, and KV
    layers of one dtype. A draft that is rounded by that guesses a little worse, which changes no output."""

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        self.whole = decoder_spec(source.decoder)

    def spec(self, found: Mapping[str, Tensor] | None) -> DecoderSpec:
        return self.whole

    @staticmethod
    def slots(spec: DecoderSpec) -> dict[str, Slot]:
        return {name: replace(slot, parameter=f"decoder.{slot.parameter}") for name, slot in weight_slots(spec).items()}

    def wanted(self, spec: DecoderSpec | None = None) -> Wanted:
        return of_decoder(self.source.decoder)

    def module(self, spec: DecoderSpec) -> DecoderHead:
        return DecoderHead(Decoder(spec, self.source.max_seq_len), self.first_layer)
