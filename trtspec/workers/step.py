"""What one launch computes: the target's forward pass and draw; with a worker also acceptance and the next drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from trtspec.core import KVLayer, PhaseMethod, StepInputs, StepOutputs
from trtspec.models.attention import FunctionalAttend, PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.workers.base import SpecWorkerBase, draw


class DecodeStep(nn.Module):
    """A target that is verified, or a draft that guesses: both run their rows and draw a token where asked.

    A draft draws with the same noise at the same token index as the target will, which is why they agree so often.

    `functional`: no KV tensor is changed in place; `kv` must be a list, whose entries are replaced by the new ones.
    """

    # what its graph takes of SpecMetadata, and what it gives
    spec_inputs: ClassVar[tuple[str, ...]] = ("seq_lens", "gather_ids")
    outputs: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self, decoder: Decoder, functional: bool = False) -> None:
        super().__init__()
        self.decoder = decoder
        self.attend = FunctionalAttend if functional else PagedAttend

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Draws at the R rows inputs.spec.gather_ids; K and V of all T rows are in `kv` afterwards."""
        attend = self.attend(inputs.attn, kv, self.decoder.spec.windows)
        hidden = self.decoder(inputs.input_ids, inputs.attn.positions(inputs.input_ids.shape[0]), attend)  # [T, H]
        logits = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        return StepOutputs(draw(logits, inputs.spec.sampling))

    def phases(self) -> Sequence[PhaseMethod]:
        """See core.Executable."""
        return ()

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights one launch reads."""
        return self.decoder.weight_bytes_per_step

    @property
    def num_captured(self) -> int:
        """Hidden states that are kept of every row, in streams of the model's width."""
        return 0

    @property
    def draft_vocab_size(self) -> int:
        """Ids that the draft layers inside tell apart; 0 = there are none."""
        return 0


class OneEngineStep(nn.Module):
    """The whole step in one graph: target, lm_head, draw, accept, rewind, draft layers. KV: the target's layers, then
    the worker's. Contexts, chunks of them and generations may mix.

    `functional`: see DecodeStep.
    """

    spec_inputs: ClassVar[tuple[str, ...]] = (
        "seq_lens",
        "gather_ids",
        "draft_tokens",
        "draft_lens",
        "next_prompt_token",
        "forced_accept",
    )
    outputs: ClassVar[tuple[str, ...]] = (
        "tokens",
        "new_tokens",
        "num_tokens",
        "next_draft_tokens",
        "next_new_tokens",
        "next_kv_lens",
    )

    def __init__(self, decoder: Decoder, worker: SpecWorkerBase, functional: bool = False) -> None:
        super().__init__()
        self.decoder = decoder
        self.worker = worker
        self.attend = FunctionalAttend if functional else PagedAttend

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Verifies the drafts in `inputs` and makes inputs.spec.next_draft_len new ones for every request."""
        attend = self.attend(inputs.attn, kv, (*self.decoder.spec.windows, *self.worker.draft_layers.windows))
        positions = inputs.attn.positions(inputs.input_ids.shape[0])
        hidden, captured = self.decoder.capture(inputs.input_ids, positions, attend, self.worker.capture_layers)
        logits: Tensor = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        return self.worker(inputs, captured, logits, attend)  # type: ignore[no-any-return]

    def phases(self) -> Sequence[PhaseMethod]:
        """See core.Executable."""
        return self.worker.phases()

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights one launch with the longest drafts reads."""
        return self.decoder.weight_bytes_per_step + self.worker.weight_bytes_per_step

    @property
    def num_captured(self) -> int:
        """See DecodeStep."""
        return len(self.worker.capture_layers)

    @property
    def draft_vocab_size(self) -> int:
        """See DecodeStep."""
        return len(self.worker.d2t)
