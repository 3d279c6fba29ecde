"""A whole smaller decoder as a draft head: it reads tokens alone, and nothing of the target."""

from __future__ import annotations

from torch import Tensor

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.head import DraftHead, HeadResources
from trtspec.models.attention import Attend
from trtspec.models.decoder import Decoder
from trtspec.models.weights import describe_decoder, load_decoder


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


def load(resources: HeadResources, target: Decoder) -> DecoderHead:
    """See methods.head.LoadHead. The draft computes in the target's dtype, whatever its own: they share a launch, and
    KV layers of one dtype. A draft that is rounded by that guesses a little worse, which changes no output."""
    assert isinstance(resources.draft, ModelConfig)
    make = load_decoder if resources.reads_weights else describe_decoder
    like = target.norm.weight
    decoder = make(resources.draft, like.dtype, "draft", resources.max_seq_len)
    with like.device:
        return DecoderHead(decoder, resources.first_draft_layer).eval()
