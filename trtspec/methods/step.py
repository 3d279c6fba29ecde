"""What one launch computes: the target's forward pass and draw; with a worker also acceptance and the next drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from trtspec.core import AttnMetadata, KVLayer, KVSpec, Proposal, StepInputs, StepOutputs
from trtspec.errors import UnsupportedError
from trtspec.kv.groups import layer_groups
from trtspec.methods.worker import SpecWorker, draw
from trtspec.models.attention import FunctionalAttend, PagedAttend
from trtspec.models.decoder import Decoder


class Step(nn.Module, ABC):
    """What all steps have, and tell of themselves.

    `functional`: no KV tensor is changed in place; `kv` must be a list, whose entries are replaced by the new ones.
    """

    verifies_drafts: ClassVar[bool] = False  # accepts drafts in its launch
    makes_drafts: ClassVar[bool] = False  # makes drafts for the next step in its launch
    draws: ClassVar[bool] = True  # StepOutputs.tokens is its own draw at each logits row
    gives_hidden_states: ClassVar[bool] = False

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self._attend = FunctionalAttend if functional else PagedAttend

    @abstractmethod
    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """One launch; K and V of all T rows are in `kv` afterwards."""

    def attend(self, attn: AttnMetadata, kv: Sequence[KVLayer]) -> PagedAttend:
        """What gives its layers their keys and values."""
        return self._attend(attn, kv, [layer.window for layer in self.kv_layers], self.kv_groups)

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A weight that is never packed: its dtype is what the step computes in, its device where."""

    @property
    @abstractmethod
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """Each KV layer, in order."""

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """Which of them share a block table, see kv/groups.py."""
        return layer_groups([layer.window for layer in self.kv_layers])

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids of the target."""

    @property
    @abstractmethod
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one launch with the longest drafts reads."""

    @property
    @abstractmethod
    def row_widths(self) -> dict[str, int]:
        """Elements of the widest tensors of all rows, for each row."""

    @property
    def hidden_width(self) -> int:
        """Elements of StepInputs.hidden_states for each row; 0 = it takes none."""
        return 0

    @property
    def draft_vocab_size(self) -> int:
        """Ids that its draft layers tell apart; 0 = there are none."""
        return 0

    @property
    def draft_rows(self) -> int:
        """Rows of draft logits that are made at once for each request."""
        return 1


class DecodeStep(Step):
    """A target that is verified, or a draft that guesses: both run their rows and draw a token where asked.

    A draft draws with the same noise at the same token index as the target will, which is why they agree so often.
    """

    def __init__(self, decoder: Decoder, functional: bool = False) -> None:
        super().__init__(functional)
        self.decoder = decoder

    @property
    def id_table(self) -> Tensor | None:
        """[V] int64, the decoder's ids of the target's; None where they are the same."""
        return None

    @property
    def reads_target_kv(self) -> bool:
        """Whether more than the decoder's layers read the KV of these."""
        return False

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Layers of the decoder whose residual streams are read for more than the next layer; -1: its last norm."""
        return ()

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Draws at the R rows inputs.spec.gather_ids."""
        attend = self.attend(inputs.attn, kv)
        hidden = self.decoder(inputs.input_ids, inputs.attn.positions(inputs.input_ids.shape[0]), attend)  # [T, H]
        logits = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        return StepOutputs(draw(logits, inputs.spec.sampling, constraints=inputs.spec.constraints), logits=logits)

    @property
    def like(self) -> Tensor:
        """See Step."""
        return self.decoder.norm.weight

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """See Step."""
        return self.decoder.spec.kv_layers

    @property
    def vocab_size(self) -> int:
        """See Step."""
        return self.decoder.spec.vocab_size

    @property
    def weight_bytes_per_step(self) -> int:
        """See Step."""
        return self.decoder.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """See Step."""
        spec = self.decoder.spec
        return {"hidden states": spec.hidden_size, "gate and up of an MLP": 2 * spec.intermediate_size}


class CaptureStep(DecodeStep):
    """As DecodeStep, and StepOutputs.hidden_states holds of all T rows the residual streams after `capture_layers`
    ("after layer i", -1 = after the last norm) side by side."""

    gives_hidden_states: ClassVar[bool] = True

    def __init__(self, decoder: Decoder, capture_layers: Sequence[int], functional: bool = False) -> None:
        super().__init__(decoder, functional)
        self.capture_layers = tuple(capture_layers)

    @property
    def read_layers(self) -> tuple[int, ...]:
        """See DecodeStep."""
        return self.capture_layers

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """See DecodeStep."""
        attend = self.attend(inputs.attn, kv)
        positions = inputs.attn.positions(inputs.input_ids.shape[0])
        hidden, captured = self.decoder.capture(inputs.input_ids, positions, attend, self.read_layers)
        logits = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        tokens = draw(logits, inputs.spec.sampling, constraints=inputs.spec.constraints)
        return StepOutputs(tokens, hidden_states=captured, logits=logits)

    @property
    def row_widths(self) -> dict[str, int]:
        """See Step."""
        return {
            **super().row_widths,
            "captured hidden states": len(self.capture_layers) * self.decoder.spec.hidden_size,
        }


class OneEngineStep(DecodeStep):
    """The whole step in one graph: target, lm_head, draw, accept, rewind, draft layers. KV: the target's layers, then
    the worker's. Contexts, chunks of them and generations may mix.
    """

    verifies_drafts: ClassVar[bool] = True
    makes_drafts: ClassVar[bool] = True

    def __init__(self, decoder: Decoder, worker: SpecWorker, functional: bool = False) -> None:
        super().__init__(decoder, functional)
        self.worker = worker

    @property
    def reads_target_kv(self) -> bool:
        """See DecodeStep."""
        return self.worker.head.reads_target_kv

    @property
    def read_layers(self) -> tuple[int, ...]:
        """See DecodeStep."""
        return self.worker.capture_layers

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Verifies the drafts in `inputs` and makes inputs.spec.next_draft_len new ones for every request."""
        attend = self.attend(inputs.attn, kv)
        positions = inputs.attn.positions(inputs.input_ids.shape[0])
        hidden, captured = self.decoder.capture(inputs.input_ids, positions, attend, self.read_layers)
        logits: Tensor = self.decoder.logits(hidden[inputs.spec.gather_ids])  # [R, V] fp32
        outputs: StepOutputs = self.worker(inputs, captured, logits, attend)
        return replace(outputs, logits=logits)

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """See Step; the worker's come last."""
        return (*super().kv_layers, *self.worker.kv_layers)

    @property
    def weight_bytes_per_step(self) -> int:
        """See Step."""
        return super().weight_bytes_per_step + self.worker.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """See Step."""
        captured = len(self.worker.capture_layers) * self.decoder.spec.hidden_size
        return {**super().row_widths, **({"captured hidden states": captured} if captured else {})}

    @property
    def draft_vocab_size(self) -> int:
        """See Step."""
        return len(self.worker.d2t)

    @property
    def draft_rows(self) -> int:
        """See Step."""
        return self.worker.draft_rows


class HeadStep(Step):
    """A worker's draft layers beside the target: all drafts of a step in one launch.

    Its rows are those of contexts: input_ids [T] are the tokens *after* each row, hidden_states [T, n * Ht] the
    target's states of it, and sampling.positions where the token after the last row is. That token is known; what
    follows it is drafted, inputs.spec.next_draft_len tokens. UnsupportedError for layers that read the target's KV,
    which is not here.
    """

    makes_drafts: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    def __init__(self, worker: SpecWorker, hidden_width: int, like: Tensor, functional: bool = False) -> None:
        super().__init__(functional)
        if worker.head.reads_target_kv:
            raise UnsupportedError(
                "these draft layers read the target's KV, which a launch beside the target does not have; draft inside "
                "the target's graph: one_engine=True"
            )
        self.worker = worker
        self._hidden_width = hidden_width
        self.register_buffer("_like", like.detach().new_empty(0), persistent=False)
        self._like: Tensor

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """See the class."""
        attn, spec = inputs.attn, inputs.spec
        assert inputs.hidden_states is not None
        attend, positions = self.attend(attn, kv), attn.positions(inputs.input_ids.shape[0])
        hidden = self.worker.first_pass(inputs.input_ids, inputs.hidden_states, positions, attend)  # [T, H]
        one = torch.ones_like(spec.next_prompt_token)  # [B]
        drafts, draft_lens = self.worker.draft(hidden, one, attn.kv_lens, attn, spec, attend)  # [B, K], [B]
        return StepOutputs(one, proposal=Proposal(drafts, draft_lens))

    @property
    def like(self) -> Tensor:
        """See Step."""
        return self._like

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """See Step."""
        return self.worker.kv_layers

    @property
    def vocab_size(self) -> int:
        """See Step."""
        return len(self.worker.draft_ids)

    @property
    def weight_bytes_per_step(self) -> int:
        """See Step."""
        return self.worker.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """See Step."""
        return {"captured hidden states": self.hidden_width}

    @property
    def hidden_width(self) -> int:
        """See Step."""
        return self._hidden_width

    @property
    def draft_vocab_size(self) -> int:
        """See Step."""
        return len(self.worker.d2t)
