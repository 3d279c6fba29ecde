"""What one launch of a model computes: append KV, attend, draw."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trtspec.core import AttnMetadata, KVLayer, SamplingTensors
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.ops import process_logits, spec_sample


class DecodeStep(nn.Module):
    """A target that is verified, or a draft that guesses: both run their rows and draw a token where asked.

    A draft draws with the same noise at the same token index as the target will, which is why they agree so often.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        attn: AttnMetadata,
        gather_ids: Tensor,  # [R] int64, rows that draw
        sampling: SamplingTensors,  # of those R rows
        kv: Sequence[KVLayer],
    ) -> Tensor:
        """Tokens drawn, [R] int64; K and V of all T rows are in `kv` afterwards."""
        positions = attn.positions(input_ids.shape[0])
        attend = PagedAttend(attn, kv, self.decoder.spec.windows)
        hidden = self.decoder(input_ids, positions, attend)  # [T, H]
        logits = self.decoder.logits(hidden[gather_ids])  # [R, V] fp32
        return draw(logits, sampling)


def draw(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Process logits [R, V] fp32 as each row asks, then draw: [R] int64."""
    none, none_f = sampling.top_ks.new_empty(0), sampling.temperatures.new_empty(0)
    logits = process_logits(
        logits, sampling.positions,
        history=none, prompt_lens=none, penalties=none_f, bias_ids=none, bias_values=none_f,
        ban_ids=sampling.ban_ids, ban_until=sampling.ban_until, allow_mask=none,
        temperatures=sampling.temperatures, top_ks=sampling.top_ks, top_ps=sampling.top_ps, min_ps=sampling.min_ps,
    )  # fmt: skip
    return spec_sample(logits, sampling.greedy, sampling.seeds, sampling.positions, none.long())
