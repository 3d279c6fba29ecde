"""A draft model with a vocabulary of its own that takes and returns the target's ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.methods.draw import draw_drafts
from trtspec.methods.step import DecodeStep
from trtspec.models.decoder import Decoder
from trtspec.text.vocabulary import VocabularyMap


class TranslatedStep(DecodeStep):
    """A DecodeStep whose input ids and drawn ids are the target's, whatever the decoder's own ids are.

    The decoder reads a token that it does not have as its unknown token. It draws among the n tokens that both
    vocabularies have, in the order of the target's ids and with their noise, as the target will. So equal distributions
    draw equal tokens.
    """

    def __init__(self, decoder: Decoder, vocabulary: VocabularyMap, functional: bool = False) -> None:
        super().__init__(decoder, functional)
        to_draft = vocabulary.target_to_draft
        common = (to_draft >= 0).nonzero()[:, 0]
        places = torch.full_like(to_draft, -1)
        places[common] = torch.arange(len(common))
        device = decoder.norm.weight.device
        for name, table in (
            ("read_as", torch.where(to_draft >= 0, to_draft, vocabulary.unknown)),  # [Vt] the decoder's ids
            ("columns", to_draft[common]),  # [n] columns of the decoder's logits
            ("target_ids", common),  # [n] target id of each column
            ("places", places),  # [Vt] index of each target id among these, or -1
        ):
            self.register_buffer(name, table.to(device), persistent=False)
        self.read_as: Tensor
        self.columns: Tensor
        self.target_ids: Tensor
        self.places: Tensor

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Draw one of the common tokens at each of the R rows inputs.spec.gather_ids; ids are the target's."""
        hidden, _ = self.run_decoder(inputs, self.read_as[inputs.input_ids], self.attend(inputs.attn, kv))
        logits = self.decoder.logits(hidden).index_select(1, self.columns)  # [R, n] fp32
        return StepOutputs(draw_drafts(logits, inputs.spec.sampling, self.target_ids, self.places))

    @property
    def id_table(self) -> Tensor:
        """[Vt] int64, the decoder's id of each target id."""
        return self.read_as

    @property
    def vocab_size(self) -> int:
        """Number of the target's ids."""
        return len(self.read_as)

    @property
    def draft_vocab_size(self) -> int:
        """Number of the decoder's own ids."""
        return self.decoder.spec.vocab_size
