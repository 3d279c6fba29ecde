"""A whole smaller decoder as a draft head, which reads only tokens and nothing of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from trtspec.methods.head import GATE_UP, DraftHead
from trtspec.methods.head_weights import HeadSource, HeadWeights
from trtspec.models.attention import Attend
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, weight_slots
from trtspec.models.specs import DecoderSpec, decoder_spec
from trtspec.models.weights import Wanted, of_decoder


class DecoderHead(DraftHead):
    """A draft head that is a whole decoder, with the target's vocabulary.

    Unlike other heads it takes the token *of* each row, and does not read h. Its output y is the decoder's state after
    the last norm. first_layer: index under which the decoder's first layer asks for KV.
    """

    def __init__(self, decoder: Decoder, first_layer: int) -> None:
        super().__init__(decoder.spec.vocab_size, kv_layers=decoder.spec.kv_layers)
        self.decoder = decoder
        self.first_layer = first_layer

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return y, the decoder's states of input_ids [T], the token *of* each row; h is not read.

        positions and rows: as in DraftHead.
        """

        def attend_own_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.first_layer + layer, q, k, v)

        return self.decoder(input_ids, positions, attend_own_layer, rows)  # type: ignore[no-any-return]

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of the hidden states and of an MLP's gate and up."""
        spec = self.decoder.spec
        return {"hidden states": spec.hidden_size, GATE_UP: 2 * spec.intermediate_size}

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Logits [R, V] fp32 of y [R, H]."""
        return self.decoder.logits(y)

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that `num_passes` passes read: each pass is a step of the decoder."""
        return num_passes * self.decoder.weight_bytes_per_step


class DecoderWeights(HeadWeights[DecoderSpec]):
    """The weights of a decoder's checkpoint.

    The draft computes in the target's dtype, whatever its own, because both share a launch and KV layers of one dtype.
    The rounding may make the draft guess a little worse, but it changes no output.
    """

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
