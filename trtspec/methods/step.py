"""The modules that one launch runs: a target with or without draft layers, or draft layers alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from trtspec.config.tree import Tree
from trtspec.core import AttnMetadata, KVLayer, KVSpec, StepInputs, StepOutputs, Verdict
from trtspec.errors import UnsupportedError
from trtspec.kv.groups import layer_groups
from trtspec.methods.draw import draw
from trtspec.methods.head import GATE_UP
from trtspec.methods.tree import TreeTables
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import FunctionalAttend, PagedAttend
from trtspec.models.decoder import Decoder


class Step(nn.Module, ABC):
    """A module that one launch runs, with the properties that describe it.

    functional: no KV tensor is changed in place. `kv` must then be a list, whose entries are replaced by the new ones.
    """

    makes_drafts: ClassVar[bool] = False  # makes drafts for the next step in its launch
    draws: ClassVar[bool] = True  # StepOutputs.tokens is its own sample at each logits row
    gives_hidden_states: ClassVar[bool] = False

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self._attend = FunctionalAttend if functional else PagedAttend

    @abstractmethod
    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Run one launch; K and V of all T rows are in `kv` afterwards."""

    def attend(self, attn: AttnMetadata, kv: Sequence[KVLayer]) -> PagedAttend:
        """Return the callable that appends a layer's keys and values to the cache and computes its attention."""
        return self._attend(attn, kv, [layer.window for layer in self.kv_layers], self.kv_groups)

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor that is never packed. Its dtype and device are those in which the step computes; it may be empty."""

    @property
    @abstractmethod
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """The spec of each KV layer, in order."""

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """The KV group of each KV layer; layers of one group share a block table (kv/groups.py)."""
        return layer_groups([layer.window for layer in self.kv_layers])

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of the target's ids."""

    @property
    @abstractmethod
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one launch with the longest drafts reads."""

    @property
    @abstractmethod
    def row_widths(self) -> dict[str, int]:
        """Elements per row of the widest tensors that contain all rows, by name."""

    @property
    def tree(self) -> TreeTables | None:
        """The tree of the drafts that the step verifies; None = a chain, or no drafts."""
        return None

    @property
    def verifies_drafts(self) -> bool:
        """Whether the launch compares drafts with the drawn tokens. Chains of a DecodeStep are compared on the host."""
        return self.tree is not None

    @property
    def takes_trees(self) -> bool:
        """Whether tree shapes are inputs of the step: those of the trees that it verifies."""
        return self.tree is not None and self.tree.is_dynamic

    @property
    def shapes_trees(self) -> bool:
        """Whether tree shapes are outputs of the step: those of the trees that it makes."""
        return False

    @property
    def gives_scores(self) -> bool:
        """Whether the drafts that the step makes have scores (Proposal.draft_scores)."""
        return False

    @property
    def hidden_width(self) -> int:
        """Elements of StepInputs.hidden_states per row; 0 = the step takes none."""
        return 0

    @property
    def draft_vocab_size(self) -> int:
        """Number of ids in the vocabulary of the draft layers; 0 = there are no draft layers."""
        return 0

    @property
    def draft_rows(self) -> int:
        """Rows of draft logits that are computed at once for each request."""
        return 1


class DecodeStep(Step):
    """A step of a target or of a draft model, both of which run their rows and sample a token where asked.

    A draft samples with the same noise at the same token index as the target does later. So the two often agree.

    tree: the shape of the drafts, None = a chain. A step with a tree accepts drafts itself, as it has to put the KV of
    the accepted path in line. Chains are accepted on the host.
    """

    def __init__(self, decoder: Decoder, functional: bool = False, tree: Tree | None = None) -> None:
        super().__init__(functional)
        self.decoder = decoder
        self._tree = None if tree is None else TreeTables.of(tree, decoder.norm.weight.device)

    @property
    def tree(self) -> TreeTables | None:
        """The tree of the drafts that the step verifies; None = a chain, or no drafts."""
        return self._tree

    @property
    def id_table(self) -> Tensor | None:
        """The decoder's id of each target id, [V] int64; None where the ids are the same."""
        return None

    @property
    def reads_target_kv(self) -> bool:
        """Whether layers outside the decoder read the KV of the decoder's layers."""
        return False

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Decoder layers whose residual streams are read by more than the next layer; -1: the last norm."""
        return ()

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Run the rows and sample at the R rows inputs.spec.gather_ids; with a tree also accept drafts."""
        if self.tree is not None:
            inputs = self.tree.placed(inputs)
        attend = self.attend(inputs.attn, kv)
        hidden, captured = self.run_decoder(inputs, inputs.input_ids, attend)
        logits = self.decoder.logits(hidden)  # [R, V] fp32
        tokens, verdict = draw(logits, inputs.spec.sampling, constraints=inputs.spec.constraints), None
        if self.tree is not None:
            verdict = self.tree.accepted(tokens, inputs.spec)
            self.compact(inputs, verdict, attend)
        states = captured if self.gives_hidden_states else None
        return StepOutputs(tokens, verdict, hidden_states=states, logits=logits)

    def compact(self, inputs: StepInputs, verdict: Verdict | None, attend: PagedAttend) -> None:
        """Put the KV of the accepted paths in line, in the layers of the decoder. Chains are in line already."""
        depth = 0 if self.tree is None else self.tree.depth_within(inputs.spec.runtime_draft_len)
        if verdict is not None and verdict.path is not None and depth:
            path = verdict.path[:, : depth + 1]
            for layer in range(len(self.decoder.spec.kv_layers)):
                attend.compact(layer, inputs.attn.kv_lens - inputs.spec.seq_lens, path)

    def run_decoder(self, inputs: StepInputs, ids: Tensor, attend: PagedAttend) -> tuple[Tensor, Tensor]:
        """Run the decoder on ids [T]; return hidden states of logits rows [R, H], and of `read_layers` [T, n * H]."""
        attn, spec = inputs.attn, inputs.spec
        rows = None if spec.is_uniform else spec.gather_ids
        return self.decoder.capture(ids, attn.positions(ids.shape[0]), attend, self.read_layers, rows)

    @property
    def like(self) -> Tensor:
        """The weight of the decoder's last norm."""
        return self.decoder.norm.weight

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """The decoder's KV layers."""
        return self.decoder.spec.kv_layers

    @property
    def vocab_size(self) -> int:
        """Number of the decoder's ids."""
        return self.decoder.spec.vocab_size

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the decoder's weights that one launch reads."""
        return self.decoder.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of the hidden states and of an MLP's gate and up."""
        spec = self.decoder.spec
        return {"hidden states": spec.hidden_size, GATE_UP: 2 * spec.intermediate_size}


class CaptureStep(DecodeStep):
    """A DecodeStep that also returns captured states of the target.

    StepOutputs.hidden_states contains the residual streams after `capture_layers`, concatenated, for all T rows. Ids
    mean "after layer i"; -1 is after the last norm.
    """

    gives_hidden_states: ClassVar[bool] = True

    def __init__(
        self,
        decoder: Decoder,
        capture_layers: Sequence[int],
        functional: bool = False,
        tree: Tree | None = None,
    ) -> None:
        super().__init__(decoder, functional, tree)
        self.capture_layers = tuple(capture_layers)

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The captured layers."""
        return self.capture_layers

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of a DecodeStep's tensors and of the captured hidden states."""
        return {
            **super().row_widths,
            "captured hidden states": len(self.capture_layers) * self.decoder.spec.hidden_size,
        }


class DraftingStep(Step):
    """A step with a worker that makes drafts for the next step."""

    makes_drafts: ClassVar[bool] = True
    worker: SpecWorker

    @property
    def gives_scores(self) -> bool:
        """Whether the worker scores its drafts."""
        return self.worker.gives_scores

    @property
    def draft_vocab_size(self) -> int:
        """Number of ids in the worker's draft vocabulary."""
        return len(self.worker.d2t)

    @property
    def draft_rows(self) -> int:
        """Rows of draft logits that the worker computes at once for each request."""
        return self.worker.draft_rows


class OneEngineStep(DraftingStep, DecodeStep):
    """A step of one launch: target, lm_head, sampling, acceptance, rewind, draft layers.

    A backend may cut it into several graphs. Its KV layers are the target's, then the worker's. A batch may mix
    contexts, chunks of contexts and generations.
    """

    def __init__(self, decoder: Decoder, worker: SpecWorker, functional: bool = False) -> None:
        super().__init__(decoder, functional)
        self.worker = worker

    @property
    def tree(self) -> TreeTables | None:
        """The tree of the worker's drafts; None = a chain."""
        return self.worker.tree

    @property
    def shapes_trees(self) -> bool:
        """Whether the worker chooses the shapes of trees."""
        return self.takes_trees

    @property
    def verifies_drafts(self) -> bool:
        """True: the worker accepts drafts before it makes the next ones."""
        return True

    @property
    def reads_target_kv(self) -> bool:
        """Whether the worker's head reads the target's KV."""
        return self.worker.head.reads_target_kv

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers that the worker captures."""
        return self.worker.capture_layers

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Verify the drafts in `inputs` and make inputs.spec.next_draft_len new ones for every request."""
        if self.tree is not None:
            inputs = self.tree.placed(inputs)
        attend = self.attend(inputs.attn, kv)
        hidden, captured = self.run_decoder(inputs, inputs.input_ids, attend)
        logits: Tensor = self.decoder.logits(hidden)  # [R, V] fp32
        outputs: StepOutputs = self.worker(inputs, captured, logits, attend)
        self.compact(inputs, outputs.verdict, attend)
        return replace(outputs, logits=logits)

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """The target's KV layers, then the worker's."""
        return (*super().kv_layers, *self.worker.kv_layers)

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that the target and the longest drafts read in one launch."""
        return super().weight_bytes_per_step + self.worker.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of a DecodeStep's tensors and of the captured hidden states, if there are any."""
        captured = len(self.worker.capture_layers) * self.decoder.spec.hidden_size
        return {**super().row_widths, **({"captured hidden states": captured} if captured else {})}


class HeadStep(DraftingStep):
    """A worker's draft layers next to the target: one launch makes all drafts of a step.

    Every request is entered as a context, so no row is a draft. The launch drafts the inputs.spec.next_draft_len tokens
    after the last known token of each request. Unlike in other steps, sampling.positions is the index of that token.

    Layers that read the target's states take them as hidden_states [T, n * Ht], and input_ids [T] are the tokens
    *after* each row. A whole draft model (hidden_width 0) takes the tokens of the rows. UnsupportedError for layers
    that read the target's KV, which is not available here.
    """

    draws: ClassVar[bool] = False

    def __init__(self, worker: SpecWorker, hidden_width: int, like: Tensor, functional: bool = False) -> None:
        super().__init__(functional)
        if worker.head.reads_target_kv:
            raise UnsupportedError(
                "these draft layers read the target's KV, which a separate launch does not have; draft inside "
                "the target's graph: one_engine=True"
            )
        self.worker = worker
        self._hidden_width = hidden_width
        self.register_buffer("_like", like.detach().new_empty(0), persistent=False)
        self._like: Tensor

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        """Run the first pass over all rows, then make the drafts of every request.

        `tokens` of the outputs are ones, and mean nothing.
        """
        attn, spec = inputs.attn, inputs.spec
        states = inputs.input_ids.new_empty(0) if inputs.hidden_states is None else inputs.hidden_states
        attend, positions = self.attend(attn, kv), attn.positions(inputs.input_ids.shape[0])
        one = torch.ones_like(spec.next_prompt_token)  # [B]
        rows = self.worker.drafting_rows(one, attn, spec)  # [B]
        hidden = self.worker.first_pass(inputs.input_ids, states, positions, attend, rows)  # [B, H]
        made = self.worker.draft(hidden, one, attn.kv_lens, attn, spec, attend)
        return StepOutputs(one, proposal=made)

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype and device in which the step computes."""
        return self._like

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """The worker's KV layers."""
        return self.worker.kv_layers

    @property
    def vocab_size(self) -> int:
        """Number of the target's ids."""
        return len(self.worker.draft_ids)

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that the worker reads for the longest drafts."""
        return self.worker.weight_bytes_per_step

    @property
    def row_widths(self) -> dict[str, int]:
        """Elements per row of the captured hidden states, if there are any, and of the head's own tensors."""
        captured = {"captured hidden states": self.hidden_width} if self.hidden_width else {}
        return {**captured, **self.worker.head.row_widths}

    @property
    def hidden_width(self) -> int:
        """Elements of StepInputs.hidden_states per row; 0 = the layers read no states of the target."""
        return self._hidden_width

    @property
    def shapes_trees(self) -> bool:
        """Whether the worker chooses the shapes of trees."""
        return self.worker.tree is not None and self.worker.tree.is_dynamic
