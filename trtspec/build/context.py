"""What an engine is assembled from: its models as steps, on its backend, by the names that configs and modes give."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from trtspec.backends.compiled import CompiledStep
from trtspec.backends.cuda.chain_graph import ChainOnCuda
from trtspec.backends.cuda.device import WorkQueue
from trtspec.backends.cuda.executable import CudaExecutable, LaunchLimits, ModuleOnCuda, module_graphs
from trtspec.backends.eager import EagerExecutable
from trtspec.backends.export import graph_draft_lens
from trtspec.backends.sizes import Sizes
from trtspec.backends.table import BACKENDS
from trtspec.build.engine_folder import EngineFolder
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.resolved import ResolvedSpeculation
from trtspec.core import KVLayer
from trtspec.engine.stats import TimedAsyncExecutable, TimedChain, TimedExecutable
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.kv.pool import allocate_layers, allocate_on, kv_nbytes
from trtspec.methods.draft_model.translated import TranslatedStep
from trtspec.methods.drafter import ChainExecutable, DraftModel
from trtspec.methods.head import DraftHead
from trtspec.methods.head_weights import HeadSource, build_head
from trtspec.methods.step import CaptureStep, DecodeStep, HeadStep, OneEngineStep, Step
from trtspec.methods.worker import SpecWorker
from trtspec.models.decoder import Decoder
from trtspec.models.layers import norms_as_ops
from trtspec.models.packing import pack_decoder
from trtspec.models.weights import DTYPES, describe_decoder, load_decoder
from trtspec.modes import SpeculativeDecodingMode
from trtspec.protocols import Executable
from trtspec.text.vocabulary import VocabularyMap

Progress = Callable[[str], None]


@dataclass
class Assembly:
    """Everything about to become an engine; also what a drafter (methods.drafter.DraftResources) or a worker
    (methods.worker.WorkerResources) is built from."""

    config: EngineConfig
    target: ModelConfig
    draft: CheckpointConfig | None  # a ModelConfig where it is a decoder
    resolved: ResolvedSpeculation | None
    max_seq_len: int
    pack: bool  # weights are kept in the kernels' layout
    functional: bool = False  # steps change no KV tensor in place
    reads_weights: bool = True  # False: steps are on torch's meta device, for plans
    symmetric: bool = False  # what is quantised to 4 bits has no zero points
    vocabulary: VocabularyMap | None = None  # of a draft that has another than the target
    built: EngineFolder | None = None  # where graphs and weights come from, if not from the checkpoints
    gpu: WorkQueue | None = None  # where steps run, if not on the CPU
    float_panels: bool = True  # False: what is not quantised stays as it is, as a GPU's kernels want it
    report: Progress = lambda message: None
    num_blocks: int = 0
    target_decoder: Decoder | None = None  # once it is there
    executables: list[TimedExecutable] = field(default_factory=list)
    chain: ChainExecutable | None = None  # of the draft model, once it is there, if its backend has one
    graph_draft_lens: tuple[int, ...] = ()  # K of the target's graphs; empty: any K
    head_draft_lens: tuple[int, ...] = ()  # likewise of draft layers beside it
    takes_edits: bool = False  # the target's launches take edits of its logits, and give these

    @property
    def speculation(self) -> ResolvedSpeculation:
        assert self.resolved is not None
        return self.resolved

    @property
    def mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.NONE if self.resolved is None else self.resolved.mode

    @property
    def max_draft_len(self) -> int:
        """K that a step verifies at most."""
        if self.resolved is None or self.mode.is_save_hidden_states():
            return 0
        return self.resolved.num_speculative_tokens

    @property
    def provisional_rows(self) -> int:
        """See kv.reuse: each MTP module reads one token further on than the one before."""
        return self.max_draft_len - 1 if self.mode.is_mtp_vanilla() else 0

    @property
    def max_num_tokens(self) -> int:
        return self.config.max_num_tokens

    def dtype(self, model: ModelConfig) -> torch.dtype:
        """What the model computes in."""
        return DTYPES[model.dtype if self.config.dtype == "auto" else self.config.dtype]

    def target_step(self) -> Step:
        """The target, with the mode's worker in its graph if it has one."""
        self.target_decoder = decoder = self._decoder(self.target, "target")
        path = None if self.resolved is None else self.resolved.mode.traits.worker
        if self.mode.is_save_hidden_states() or self.mode.reads_hidden_states():
            layers = self.speculation.capture_layers
            if self.mode.is_save_hidden_states():
                layers = (*layers, -1)
            return self._packed(CaptureStep(decoder, layers, self.functional))
        if path is None:
            return self._packed(DecodeStep(decoder, self.functional))
        worker = cast("type[SpecWorker]", load_named(path)).from_resources(self, decoder)
        return self._packed(OneEngineStep(decoder, worker, self.functional), worker)

    def draft_step(self) -> Step:
        """The draft checkpoint, or the mode's head, as a model of its own; after the target's."""
        if self.mode.reads_hidden_states():
            assert self.target_decoder is not None
            worker, target = SpecWorker.from_resources(self, self.target_decoder), self.target_decoder
            width = len(self.speculation.capture_layers) * target.spec.hidden_size
            return self._packed(HeadStep(worker, width, target.norm.weight, self.functional), worker)
        assert isinstance(self.draft, ModelConfig)
        decoder = self._decoder(self.draft, "draft")
        if self.vocabulary is not None:
            return self._packed(TranslatedStep(decoder, self.vocabulary, self.functional), decoder)
        return self._packed(DecodeStep(decoder, self.functional), decoder)

    def load_head(self, target: Decoder) -> DraftHead:
        """The head that the mode's row names. In a graph of its own its KV layers come first."""
        mode, speculation = self.mode, self.speculation
        assert mode.traits.head is not None
        checkpoint = self.target if mode.traits.mtp else self.draft
        assert checkpoint is not None
        each_drafts_one = mode.drafts_without_kv() or mode.is_mtp_vanilla()
        source = HeadSource(
            checkpoint=checkpoint,
            owner=self.target,
            num_stages=speculation.num_speculative_tokens if each_drafts_one else 1,
            num_captured=len(speculation.capture_layers),
            parallel=mode.drafts_in_parallel(),
            max_seq_len=self.max_seq_len,
            first_layer=0 if mode.reads_hidden_states() else None,
            reads_weights=self.reads_weights,
        )
        return build_head(load_named(mode.traits.head), source, target)

    def _decoder(self, model: ModelConfig, role: str) -> Decoder:
        make = load_decoder if self.reads_weights else describe_decoder
        return make(model, self.dtype(model), role, self.max_seq_len)

    def _packed(self, step: Step, draft: nn.Module | None = None) -> Step:
        """The step with its weights as the kernels want them, those of `draft` quantised as speculation asks."""
        if self.pack or self.quantizations != (None, None):
            target_kind, draft_kind = self.quantizations
            try:
                pack_decoder(step, target_kind, draft, draft_kind, self.symmetric, self.float_panels)
            except ValueError as error:
                kinds = f"quantization = {target_kind!r}, of the draft {draft_kind!r}"
                raise UnsupportedError(f"{kinds}: {error}") from error
        return step

    @property
    def quantizations(self) -> tuple[str | None, str | None]:
        """Of target and draft."""
        own = None if self.resolved is None else self.resolved.quantization
        return self.config.quantization, own

    def target_model(self) -> Executable:
        """What verifies, on the configured backend."""
        self.takes_edits = True
        return self._module(self.target_step()) if self.built is None else self._compiled(self.built, "target")

    def draft_model(self) -> DraftModel:
        """See methods.drafter.DraftResources."""
        draft = self._module(self.draft_step()) if self.built is None else self._compiled(self.built, "draft")
        return DraftModel(draft, self.chain, self.head_draft_lens)

    def _module(self, step: Step) -> Executable:
        layers, dtype = step.kv_layers, step.like.dtype
        if self.gpu is not None:
            step.to(self.gpu.device)
            norms_as_ops(step)
            kv = allocate_on(self.gpu.device, layers, self.num_blocks, self.config.block_size, dtype)
            edits = not self.executables  # the target comes first
            compiled = module_graphs(step, self._module_draft_lens(step), self.config.enable_cuda_graph, edits)
            return self._graphed(ModuleOnCuda(step, compiled, kv, self.gpu, self._limits()))
        kv = allocate_layers(layers, self.num_blocks, self.config.block_size, dtype)
        return self._timed(EagerExecutable(step, kv), step.weight_bytes_per_step, kv)

    def _module_draft_lens(self, step: Step) -> Sequence[int]:
        """K that a launch of it may be asked for."""
        own = graph_draft_lens(step, self.resolved)
        if own != (0,) or self.executables:  # a draft beside the target, which comes first
            return own
        return range(self.max_draft_len + 1)

    def _limits(self) -> LaunchLimits:
        sizes = Sizes.of(self.config, self.max_seq_len, self.max_draft_len, self.num_blocks)
        return LaunchLimits(sizes.batch_size, sizes.columns)

    def _graphed(self, executable: CudaExecutable) -> Executable:
        role = "draft" if self.executables else "target"  # which comes first

        def report(done: int, total: int) -> None:
            self.report(f"capturing CUDA graphs of the {role}: {done} of {total}")

        timed = TimedAsyncExecutable(executable, executable.compiled.weight_bytes, kv_nbytes(executable.kv))
        self.executables.append(timed)
        self._learn_draft_lens(executable.compiled)
        if role == "draft" and self.config.enable_cuda_graph and not executable.compiled.makes_drafts:
            assert self.gpu is not None
            chain = ChainOnCuda(executable, self.gpu, self._limits(), self.max_draft_len)
            chain.capture(report)  # in place of graphs of one pass, which are seldom asked for
            self.chain = TimedChain(chain, timed)
        else:
            executable.capture(report)
        return timed

    def _compiled(self, built: EngineFolder, role: str) -> Executable:
        compiled = CompiledStep.from_dict(built.data["executables"][role])
        executable = BACKENDS[built.backend].load_executable()
        executable.check(compiled)
        if role == "target":
            self.takes_edits = compiled.takes_edits
        if self.gpu is not None:
            dtype = DTYPES[compiled.dtype]
            there = allocate_on(self.gpu.device, compiled.kv, self.num_blocks, self.config.block_size, dtype)
            graphed = cast("type[CudaExecutable]", executable)
            return self._graphed(graphed(compiled, built.path / role, there, self.gpu, self._limits()))
        kv = executable.allocate_kv(compiled, self.num_blocks, self.config.block_size, DTYPES[compiled.dtype])
        self._learn_draft_lens(compiled)
        return self._timed(executable(compiled, built.path / role, kv), compiled.weight_bytes, kv)

    def _learn_draft_lens(self, compiled: CompiledStep) -> None:
        if compiled.verifies_drafts:
            self.graph_draft_lens = compiled.draft_lens
        elif compiled.makes_drafts:
            self.head_draft_lens = compiled.draft_lens

    def _timed(self, executable: Executable, weight_bytes: int, kv: Sequence[KVLayer]) -> Executable:
        self.executables.append(TimedExecutable(executable, weight_bytes, kv_nbytes(kv)))
        return self.executables[-1]


def load_named(path: str) -> Any:
    """ "package.module:Name" -> the object; ConfigError if there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'{path!r} cannot be loaded ({error}); give "package.module:Class"') from error
